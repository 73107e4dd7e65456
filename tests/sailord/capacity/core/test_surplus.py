"""Surplus instances: which are deleted, which are drained first, and which stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sailord.capacity.core.decide import record_of
from sailord.capacity.core.model import (
    Agent,
    AgentsCounted,
    CapacityPolicy,
    DeleteInstances,
    Drain,
    PricesRead,
    QuotasRead,
    TargetSet,
    Tick,
)
from sailord.providers.interface import QuotaUsage
from tests.sailord.capacity.core.story import PRICES, A, B, Story, instance


def test_surplus_is_deleted_after_surplus_s_unused_first():
    both = instance(1), instance(2)
    story = Story().see(11.0, *both).hear(TargetSet(11.0, {A: 2}))
    agents = {"n1": Agent(4), "n2": Agent(4)}
    story.hear(AgentsCounted(20.0, agents, frozenset({"n2"})))
    assert story.hear(TargetSet(30.0, {A: 1})).of(DeleteInstances) == []
    assert story.hear(Tick(329.0)).of(DeleteInstances) == []
    assert story.hear(Tick(331.0)).of(DeleteInstances) == [DeleteInstances(("1",))]


def test_surplus_in_use_is_drained_then_deleted():
    story = Story().see(11.0, instance()).hear(TargetSet(11.0, {A: 0}))
    story.hear(AgentsCounted(20.0, {"n1": Agent(4)}, frozenset({"n1"})))
    story.hear(Tick(320.0))
    assert [order.node for order in story.of(Drain)] == ["n1"]
    assert story.of(DeleteInstances) == []
    story.hear(AgentsCounted(330.0, {"n1": Agent(4, is_leaving=True)}, frozenset()))
    assert story.of(DeleteInstances) == [DeleteInstances(("1",))]


def _surplus_in_use(usd_per_hour_max) -> Story:
    """The job stands on two instances of A, and one of B is wanted instead."""
    story = Story(CapacityPolicy(usd_per_hour_max=usd_per_hour_max)).see(
        11.0, instance(1), instance(2)
    )
    agents = {"n1": Agent(4), "n2": Agent(4)}
    return story.hear(AgentsCounted(20.0, agents, frozenset(agents)))


def test_surplus_in_use_that_blocks_the_target_by_cost_is_drained():
    story = _surplus_in_use(11.0).hear(TargetSet(30.0, {B: 1}))
    assert story.hear(Tick(310.0)).orders == ()
    story.hear(Tick(331.0))
    assert [order.node for order in story.of(Drain)] == ["n1"], "one is enough"
    assert story.hear(Tick(340.0)).orders == (), "the money of the first counts on"
    agents = {"n1": Agent(4, is_leaving=True), "n2": Agent(4)}
    story.hear(AgentsCounted(350.0, agents, frozenset({"n2"})))
    assert story.of(DeleteInstances) == [DeleteInstances(("1",))]
    assert story.see(360.0, instance(2)).asks() == [(B, 1)]
    assert story.of(Drain) == []


@pytest.mark.parametrize("usd_per_hour_max", [None, 14.5, 7.2], ids=["no limit", "enough", "never"])
def test_surplus_in_use_stays_if_its_cost_would_not_suffice(usd_per_hour_max):
    story = _surplus_in_use(usd_per_hour_max).hear(PricesRead(25.0, {**PRICES, B: 7.3}))
    story.hear(TargetSet(30.0, {B: 1}))
    assert story.hear(Tick(331.0)).of(Drain) == []
    assert story.hear(Tick(9999.0)).of(Drain) == []


def test_surplus_above_the_hourly_limit_is_deleted_at_once():
    agents = {"n1": Agent(4), "n2": Agent(4)}
    story = Story(CapacityPolicy(usd_per_hour_max=7.2)).see(11.0, instance(1), instance(2))
    story.hear(AgentsCounted(20.0, agents, frozenset({"n2"}))).hear(TargetSet(30.0, {A: 1}))
    assert story.of(DeleteInstances) == []
    assert story.hear(PricesRead(40.0, {**PRICES, A: 3.7})).of(DeleteInstances) == [
        DeleteInstances(("1",))
    ]
    story = _surplus_in_use(7.1).hear(TargetSet(30.0, {}))
    assert [order.node for order in story.of(Drain)] == ["n1", "n2"], "the whole target is there"
    story = _surplus_in_use(7.1).hear(TargetSet(30.0, {B: 1}))
    assert [order.node for order in story.of(Drain)] == ["n1"], "the job keeps the other one"


def test_surplus_in_use_stays_while_the_target_is_unavailable():
    story = _surplus_in_use(11.0).hear(QuotasRead(25.0, (QuotaUsage("GPUS", (B,), 3.0, 0.0),)))
    assert story.hear(TargetSet(30.0, {B: 1})).hear(Tick(331.0)).of(Drain) == []
    assert [d.node for d in story.hear(QuotasRead(400.0, ())).of(Drain)] == ["n1"]


def test_the_most_expensive_surplus_in_use_is_drained_first():
    cheap, dear = instance(1), replace(instance(2), pool=B)
    story = Story(CapacityPolicy(usd_per_hour_max=14.0)).see(11.0, cheap, dear)
    agents = {"n1": Agent(4), "n2": Agent(4)}
    story.hear(AgentsCounted(20.0, agents, frozenset(agents)))
    c = replace(A, zone="zone-c")
    story.hear(PricesRead(25.0, {**PRICES, c: 6.0})).hear(TargetSet(30.0, {c: 1}))
    assert [order.node for order in story.hear(Tick(331.0)).of(Drain)] == ["n2"]


def test_nothing_is_surplus_before_the_planner_has_answered():
    first = Story().see(11.0, instance()).hear(TargetSet(11.0, {A: 1}))
    first.hear(AgentsCounted(20.0, {"n1": Agent(4)}, frozenset({"n1"})))
    story = Story(books=record_of(first.state)).see(100.0, instance())
    story.count(1000.0, {"n1": Agent(4)}, frozenset({"n1"}))
    assert (story.of(Drain), story.of(DeleteInstances)) == ([], [])
    story.hear(TargetSet(1001.0, {})).count(1400.0, {"n1": Agent(4)}, frozenset({"n1"}))
    assert story.state.instances["1"].is_drained


def test_the_cost_of_a_quarantined_instance_is_not_freed():
    """It stays and is billed, so moving the job off another instance would not pay for the
    target."""
    story = _surplus_in_use(10.7)
    agents = {"n1": Agent(4), "n2": Agent(4, is_out=True)}
    story.hear(TargetSet(30.0, {B: 1})).count(400.0, agents, frozenset({"n1"}))
    assert [order.node for order in story.of(Drain)] == []
