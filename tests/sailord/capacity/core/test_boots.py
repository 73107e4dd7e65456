"""Only an agent that registers proves a pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.codec import decode, encode
from sailord.capacity.core.boots import why_stopped
from sailord.capacity.core.decide import record_of
from sailord.capacity.core.model import (
    Agent,
    AgentsCounted,
    BootsRetried,
    CapacityPolicy,
    CapacityRecord,
    Create,
    DeleteInstances,
    Drain,
    Log,
    RequestAnswered,
    TargetSet,
    Tick,
)
from sailord.capacity.core.retirement import LAST_DRAIN_S, RETIRE_S
from sailord.capacity.core.supply import obtainable
from sailord.providers.interface import Granted, Preemption
from tests.sailord.capacity.core.story import A, B, Story, instance

BOOT_S = CapacityPolicy().boot_s


def rent(story: Story, at: float, *numbers: int, wanted: int = 8) -> Story:
    """Want instances of a pool, and get as many as are asked for."""
    story.see(at, *seen(story)).hear(TargetSet(at, {A: wanted}))
    (order,) = story.of(Create)
    assert order.ask.count == len(numbers)
    made = tuple(instance(n, request=order.ask.request_id, at=at) for n in numbers)
    return story.hear(RequestAnswered(at + 1, Granted(order.ask.request_id, made)))


def seen(story: Story):
    return [each.instance for each in story.state.instances.values()]


def fail(story: Story, at: float) -> Story:
    """No agent registers until ``at``, and everything is deleted."""
    story.count(at, {})
    (order,) = story.of(DeleteInstances)
    return story.see(at + 1, ended_at=dict.fromkeys(order.ids, at))


def test_until_an_agent_registers_three_instances_are_rented():
    story = rent(Story(), 1.0, 1, 2, 3)
    assert story.see(60.0, *seen(story)).asks() == []
    story.hear(AgentsCounted(70.0, {"n1": Agent(4)}))
    assert story.asks() == [(A, 5)], "now all others are"


def test_no_agent_is_late_while_agents_cannot_be_counted():
    story = rent(Story(), 1.0, 1, 2, 3).count(300.0, {})
    assert story.hear(AgentsCounted(1200.0, {})).orders == (), "the store was away"
    assert story.count(1205.0, {f"n{n}": Agent(4) for n in (1, 2, 3)}).of(DeleteInstances) == []
    story.hear(AgentsCounted(1210.0, {}))
    assert story.hear(AgentsCounted(2000.0, {})).of(DeleteInstances) == [], "away again"
    assert story.count(2061.0, {}).of(DeleteInstances) == [DeleteInstances(("1", "2", "3"))]


def test_an_agent_without_all_its_gpus_proves_nothing():
    story = rent(Story(), 1.0, 1, 2, 3)
    story.hear(AgentsCounted(70.0, {"n1": Agent(3)}))
    assert story.asks() == []
    assert story.state.boots[A].failures == 1


def test_a_pool_is_stopped_after_three_failures_until_an_operator_orders_it():
    story = fail(rent(Story(), 1.0, 1, 2, 3), BOOT_S + 3)
    later = BOOT_S + 86_400.0
    assert story.hear(Tick(later)).asks() == []
    assert obtainable(story.state, A) == 0
    assert "3 instances in a row started no agent: no agent registered within 600 s" in (
        why_stopped(story.state, A)
    )
    again = Story(books=decode(CapacityRecord, encode(record_of(story.state))))
    again.see(later).hear(TargetSet(later, {A: 8}))
    assert again.asks() == [], "a new leader knows of it"
    assert again.hear(BootsRetried(later + 1)).asks() == [(A, 3)]


def test_before_the_first_agent_a_failing_pool_stops_all():
    story = fail(rent(Story(), 1.0, 1, 2, 3), BOOT_S + 3)
    story.hear(TargetSet(BOOT_S + 5, {B: 1}))
    assert story.asks() == []
    assert "3 instances of all pools in a row" in why_stopped(story.state, B)


def test_a_proven_pool_goes_on_while_another_fails():
    story = rent(Story(), 1.0, 1, 2, 3, wanted=3)
    story.hear(AgentsCounted(70.0, {f"n{n}": Agent(4) for n in (1, 2, 3)}))
    state = story.state
    failing = replace(state.boots[A], pool=B, has_joined=False, failures=3, text="as told")
    story.state = replace(state, boots={**state.boots, B: failing}, boots_failed=3)
    story.hear(TargetSet(80.0, {A: 5, B: 1}))
    assert story.asks() == [(A, 2)]
    story.state = replace(story.state, asks={}, boots_failed=9)
    assert story.hear(Tick(90.0)).asks() == [], "nine in a row are no pool's own fault"


def test_an_instance_that_switches_itself_off_has_failed_and_a_preempted_one_has_not():
    story = rent(Story(), 1.0, 1, 2, 3)
    off = [instance(n, request=seen(story)[0].request_id, state="preempted") for n in (1, 2)]
    story.see(30.0, *off, seen(story)[2], preemptions=(Preemption("2", 29.0),))
    assert story.state.boots[A].failures == 1
    assert [o.text for o in story.of(Log)][:2] == [
        "m1: powered off before its agent registered", "m2: preempted",
    ]  # fmt: skip


def test_an_instance_that_the_provider_will_delete_is_replaced_before():
    story = rent(Story(), 1.0, 1, wanted=1)
    end = 100_000.0
    old = replace(seen(story)[0], ends_at=end)
    agents, used = {"n1": Agent(4)}, frozenset({"n1"})
    story.hear(AgentsCounted(50.0, agents, used)).see(50.0, old)
    assert story.hear(AgentsCounted(end - RETIRE_S - 1, agents, used)).orders == ()
    story.see(end - RETIRE_S, old)
    assert story.asks() == [(A, 1)]
    story.hear(Tick(end - LAST_DRAIN_S))
    assert [order.leaves_at for order in story.of(Drain)] == [end]
    assert [order.node for order in story.of(Drain)] == ["n1"]
    assert story.hear(Tick(end - LAST_DRAIN_S + 1)).of(Drain) == [], "ordered once"
    story.hear(AgentsCounted(end - LAST_DRAIN_S + 9, agents))
    assert story.of(DeleteInstances) == [DeleteInstances(("1",))]


def test_instances_of_one_age_are_replaced_one_by_one_and_kept_until_they_are():
    story = rent(Story(), 1.0, 1, 2, 3, wanted=3)
    end, agents = 100_000.0, {f"n{n}": Agent(4) for n in (1, 2, 3)}
    old = [replace(each, ends_at=end) for each in seen(story)]
    story.hear(AgentsCounted(50.0, agents)).see(50.0, *old)
    assert story.see(end - 3 * RETIRE_S - 1, *old).asks() == []
    assert story.see(end - 3 * RETIRE_S, *old).asks() == [(A, 1)]
    story.hear(AgentsCounted(end - 2 * RETIRE_S, agents))
    assert story.of(DeleteInstances) == [], "unused for a moment, but not replaced yet"
    assert sum(m.is_retiring for m in story.state.instances.values()) == 2
    story.hear(Tick(end - LAST_DRAIN_S))
    assert {order.leaves_at for order in story.of(Drain)} == {end}


def test_a_job_moves_off_an_instance_that_will_end_once_another_one_is_there():
    """Otherwise both would be paid until the end: for hours, where many instances are of one
    age."""
    story = rent(Story(), 1.0, 1, 2, wanted=2)
    end, agents, used = 100_000.0, {f"n{n}": Agent(4) for n in (1, 2)}, frozenset({"n1", "n2"})
    old = [replace(each, ends_at=end) for each in seen(story)]
    story.hear(AgentsCounted(50.0, agents, used)).see(50.0, *old)
    begins = end - 2 * RETIRE_S
    assert story.see(begins, *old).asks() == [(A, 1)]
    (asked,) = story.state.asks
    new = instance(3, request=asked, at=begins)
    assert story.see(begins + 10.0, *old, new).of(Drain) == []
    story.hear(AgentsCounted(begins + 200.0, agents | {"n3": Agent(4)}, used))
    (goes,) = [m.instance.node for m in story.state.instances.values() if m.is_retiring]
    assert [(each.node, each.leaves_at) for each in story.of(Drain)] == [(goes, end)]
    story.hear(AgentsCounted(begins + 230.0, agents | {"n3": Agent(4)}, used - {goes} | {"n3"}))
    assert story.of(DeleteInstances) == [DeleteInstances((goes.removeprefix("n"),))]
    assert story.hear(Tick(end - RETIRE_S - 1.0)).of(Drain) == [], "the next one has its own time"


@pytest.mark.parametrize("run_s", [3600.0, 4 * 3600.0, 7 * 86400.0])
def test_instances_with_a_short_time_limit_are_not_replaced_at_once(run_s):
    policy = CapacityPolicy(boot_failures_max=16)
    story = rent(Story(policy), 1.0, *range(1, 17), wanted=16)
    agents = {f"n{n}": Agent(4) for n in range(1, 17)}
    new = [replace(each, ends_at=each.created_at + run_s) for each in seen(story)]
    story.hear(AgentsCounted(50.0, agents)).see(50.0, *new)
    half = min(each.created_at for each in new) + 0.5 * run_s
    assert story.see(half - 1.0, *new).asks() == []
    assert not any(m.is_retiring for m in story.state.instances.values())


def test_retry_forgets_the_failures_of_instances_that_are_up_too():
    story = rent(Story(), 1.0, 1, 2, 3).hear(BootsRetried(300.0))
    again = Story(books=decode(CapacityRecord, encode(record_of(story.state))))
    again.see(301.0, *seen(story)).hear(TargetSet(301.0, {A: 8}))
    assert again.asks() == [], "the old ones may still come up"
    fail(again, 321.0 + BOOT_S)
    assert why_stopped(again.state, A) == "", "they may lack what was mended since"
    assert [asked.ask.count for asked in again.state.asks.values()] == [3]


def test_after_retry_an_instance_that_goes_off_is_forgotten_if_it_is_older():
    story = rent(Story(), 1.0, 1, 2, 3).hear(BootsRetried(20.0))
    off = [instance(n, request=seen(story)[0].request_id, state="preempted") for n in (1, 2)]
    later = replace(off[1], created_at=21.0)
    story.see(30.0, off[0], later, seen(story)[2])
    assert story.state.boots[A].failures == 1
