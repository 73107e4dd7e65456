"""Requests that wait in the provider's queue, for hours if need be."""

from __future__ import annotations

import pytest

from agents.protocol.codec import decode, encode, plain
from planner.move_policy.node_lifetimes import LifetimeHistory
from sailord.api.handlers.capacity import capacity_view
from sailord.capacity.core.boots import room
from sailord.capacity.core.budget import spent_usd, usd_per_hour
from sailord.capacity.core.decide import record_of
from sailord.capacity.core.model import (
    Agent,
    AgentsCounted,
    Cancel,
    CapacityPolicy,
    CapacityRecord,
    Create,
    DeleteInstances,
    Drain,
    PauseJob,
    RequestAnswered,
    TargetSet,
    Tick,
)
from sailord.capacity.core.planner_view import pool_supplies
from sailord.capacity.core.supply import supply
from sailord.core.model.state import State
from sailord.providers.interface import InDoubt, Instance, InstanceRequest, Queued, Refused
from sailord.text.capacity_text import capacity_text
from tests.sailord.capacity.core.story import FLEX, PRICES, A, Story, instance

HOUR = 3600.0


def waiting(count: int = 2, policy: CapacityPolicy | None = None) -> tuple[Story, str]:
    """A story whose request waits in the queue since second 2."""
    story = Story(policy).see(1.0).hear(TargetSet(1.0, {FLEX: count}))
    (order,) = story.of(Create)
    id_ = order.ask.request_id
    return story.hear(RequestAnswered(2.0, Queued(id_))), id_


def test_what_may_wait_is_requested_as_a_whole():
    """A part would be billed while the rest waits."""
    policy = CapacityPolicy(machines_per_pool_max=32)
    story = Story(policy).see(1.0).hear(TargetSet(1.0, {FLEX: 20}))
    assert story.asks() == [(FLEX, 20)]


def watch(story: Story, until: float, id_: str) -> list[object]:
    """Observe the queue with the request in it; return all orders."""
    orders: list[object] = []
    there = {id_: InstanceRequest(id_, FLEX, 2)}
    for minute in range(int(story.state.now // 60) + 1, int(until // 60) + 1):
        orders += story.see(60.0 * minute, queued=there).orders
    return orders


def test_a_request_that_waits_is_kept_for_hours_and_costs_nothing():
    story, id_ = waiting()
    assert watch(story, 5 * HOUR, id_) == []
    assert spent_usd(story.hear(Tick(5 * HOUR + 50.0)).state) == 0
    assert usd_per_hour(story.state) == pytest.approx(2 * PRICES[FLEX]), "it may come any time"
    assert supply(story.state)[FLEX] == 2, "no second one is sent"
    view = capacity_view("gce", story.state, (FLEX,), State(term=1), LifetimeHistory())
    text = capacity_text(plain(view))
    assert (view.pools[0].asked, view.pools[0].waits_s) == (2, 5 * HOUR + 48)
    assert "large in zone-a (flex start): a request has waited for 5.0 h in the provider's" in text


def test_the_planner_does_not_count_on_queued_requests():
    story, _ = waiting()
    (pool,) = pool_supplies(story.state, (FLEX,), State(term=1))
    assert (pool.up, pool.obtainable, pool.is_on_demand) == (0, 16, False)


def test_instances_that_were_granted_cost_from_their_creation_and_settle_the_request():
    story, id_ = waiting()
    watch(story, HOUR, id_)
    made = [instance(number, FLEX, id_, at=HOUR + 30.0) for number in (1, 2)]
    assert story.see(HOUR + 60.0, *made).orders == ()
    assert not story.state.asks
    assert spent_usd(story.state) == pytest.approx(2 * PRICES[FLEX] * 30.0 / 3600)
    assert usd_per_hour(story.state) == pytest.approx(2 * PRICES[FLEX])


def test_a_lost_answer_is_settled_by_the_queue():
    story = Story().see(1.0).hear(TargetSet(1.0, {FLEX: 1}))
    id_ = story.of(Create)[0].ask.request_id
    story.hear(RequestAnswered(30.0, InDoubt(id_)))
    assert watch(story, HOUR, id_) == []
    assert story.state.asks[id_].is_queued
    assert spent_usd(story.state) == 0


def test_a_request_that_leaves_the_queue_unseen_is_in_doubt_and_then_given_up():
    story, id_ = waiting()
    watch(story, HOUR, id_)
    story.see(HOUR + 10.0)
    assert story.state.asks[id_].is_in_doubt
    assert spent_usd(story.state) == pytest.approx(0.0, abs=0.1), "not from its first hour on"
    story.see(HOUR + 140.0)
    assert not story.state.asks
    assert story.state.cooldowns[FLEX].kind == "unknown"


def test_a_request_that_was_given_up_and_waits_after_all_counts_again():
    story, id_ = waiting()
    story.see(10.0).see(200.0)
    assert not story.state.asks
    watch(story, 600.0, id_)
    assert supply(story.state)[FLEX] == 2
    assert len(story.hear(TargetSet(700.0, {})).of(Cancel)) == 1
    made = [instance(number, FLEX, id_, at=705.0) for number in (1, 2)]
    for at in (710.0, 720.0):
        story.see(at, *made, queued={id_: InstanceRequest(id_, FLEX, 2)})
        assert not story.state.asks, "its instances are there, so it does not count twice"


@pytest.mark.parametrize("unseen", ["unseen_zones", "unseen_queues"])
def test_a_zone_that_is_not_seen_leaves_its_requests_in_the_queue(unseen):
    story, id_ = waiting()
    story.see(60.0, **{unseen: ("zone-a",)}).see(600.0, **{unseen: ("zone-a",)})
    assert story.state.asks[id_].is_queued


@pytest.mark.parametrize("kind", ["quota", "stockout"])
def test_a_refusal_after_waiting_rests_the_pool(kind):
    story, id_ = waiting()
    watch(story, HOUR, id_)
    refused = (Refused(id_, kind, "as told"),)
    story.see(HOUR + 10.0, refused=refused)
    assert not story.state.asks
    assert story.state.cooldowns[FLEX].kind == kind
    until = story.state.cooldowns[FLEX].until
    story.see(until, refused=refused)
    assert story.asks() == [(FLEX, 2)], "what is told again of the first does not concern it"


def test_a_request_is_withdrawn_when_its_job_ends():
    story, id_ = waiting()
    (order,) = story.hear(TargetSet(10.0, {})).of(Cancel)
    assert order.ask.request_id == id_
    assert story.hear(Tick(20.0)).of(Cancel) == []
    assert len(story.hear(Tick(41.0)).of(Cancel)) == 1, "again, as nothing was seen of it"
    story.see(50.0, refused=(Refused(id_, "unknown", "cancelled"),))
    assert (story.state.asks, story.state.cooldowns) == ({}, {})


def test_a_request_that_other_instances_replace_is_withdrawn_after_a_while():
    story, _ = waiting()
    assert story.hear(TargetSet(10.0, {A: 1})).of(Cancel) == []
    story.hear(TargetSet(100.0, {FLEX: 2})).hear(TargetSet(200.0, {A: 1}))
    assert story.hear(Tick(499.0)).of(Cancel) == []
    assert len(story.hear(Tick(500.0)).of(Cancel)) == 1


def test_instances_granted_before_the_withdrawal_are_deleted():
    story, id_ = waiting(1)
    story.hear(TargetSet(10.0, {})).see(20.0, instance(1, FLEX, id_, at=15.0))
    assert not story.state.asks
    (order,) = story.hear(Tick(400.0)).of(DeleteInstances)
    assert order.ids == ("1",)


def test_a_spent_budget_withdraws_at_once():
    story, id_ = waiting(policy=CapacityPolicy(usd_max=1.0))
    there = {id_: InstanceRequest(id_, FLEX, 2)}
    story.see(10.0, instance(1, A, "x", at=-1000.0), queued=there)
    assert story.state.stop
    assert len(story.of(Cancel)) == 1


def test_the_hourly_limit_counts_a_waiting_request_once():
    story, id_ = waiting(policy=CapacityPolicy(usd_per_hour_max=2 * PRICES[FLEX] + PRICES[A] - 0.1))
    story.hear(TargetSet(10.0, {FLEX: 2, A: 1}))
    assert story.asks() == []
    made = [instance(number, FLEX, id_, at=30.0) for number in (1, 2)]
    assert story.see(60.0, *made).asks() == []
    story, _ = waiting(policy=CapacityPolicy(usd_per_hour_max=2 * PRICES[FLEX] + PRICES[A]))
    assert story.hear(TargetSet(10.0, {FLEX: 2, A: 1})).asks() == [(A, 1)]


def test_the_next_leader_finds_a_request_in_the_queue():
    first, id_ = waiting()
    books = decode(CapacityRecord, encode(record_of(first.state)))
    story = Story(books=books).hear(TargetSet(20.0, {FLEX: 2}))
    assert watch(story, HOUR, id_) == []
    assert story.state.asks[id_].queued_since == 2.0
    assert spent_usd(story.state) == 0


def test_other_pools_are_tried_while_a_request_waits():
    story, _ = waiting(3)
    assert room(story.state, A) == story.state.policy.boot_failures_max


def test_the_known_end_of_a_queued_instance_moves_the_job_off_in_time():
    story, id_ = waiting(1)
    one = Instance("1", "m1", FLEX, "running", 60.0, id_, "n1", ends_at=60.0 + HOUR)
    story.see(61.0, one).hear(AgentsCounted(70.0, {"n1": Agent(4)}, frozenset({"n1"})))
    end = 60.0 + HOUR
    story.count(end - 400.0, {"n1": Agent(4)}, frozenset({"n1"}))
    assert [order.ask.pool for order in story.of(Create)] == [FLEX], "the next one waits early"
    story.count(end - 200.0, {"n1": Agent(4)}, frozenset({"n1"}))
    (drain,) = story.of(Drain)
    assert (drain.node, drain.leaves_at) == ("n1", end)


@pytest.mark.parametrize("usd_per_hour_max", [8.0, 12.0])
def test_surplus_in_use_stays_until_queued_instances_arrive(usd_per_hour_max):
    """The limit does not pay for both: the job must not stand still for as long as a queue."""
    story = Story(CapacityPolicy(usd_per_hour_max=usd_per_hour_max))
    agents = {f"n{number}": Agent(4) for number in (1, 2)}
    story.see(11.0, instance(1), instance(2)).count(60.0, agents, frozenset(agents))
    story.hear(TargetSet(61.0, {FLEX: 2})).count(HOUR, agents, frozenset(agents))
    assert (story.of(Drain), story.of(DeleteInstances), story.asks()) == ([], [], [])


def test_surplus_in_use_is_drained_once_queued_instances_arrive():
    story = Story(CapacityPolicy(usd_per_hour_max=14.4)).see(11.0, instance(1), instance(2))
    old = {f"n{number}": Agent(4) for number in (1, 2)}
    story.count(60.0, old, frozenset(old)).hear(TargetSet(61.0, {FLEX: 2}))
    (order,) = story.of(Create)
    id_ = order.ask.request_id
    story.hear(RequestAnswered(62.0, Queued(id_))).count(HOUR, old, frozenset(old))
    assert story.of(Drain) == []
    made = [instance(number, FLEX, id_, at=HOUR) for number in (3, 4)]
    both = old | {f"n{number}": Agent(4) for number in (3, 4)}
    story.see(HOUR + 10.0, instance(1), instance(2), *made).count(HOUR + 60.0, both, frozenset(old))
    assert [order.node for order in story.of(Drain)] == ["n1", "n2"]


def test_pools_without_a_queue_get_the_hourly_limit_first():
    story = Story(CapacityPolicy(usd_per_hour_max=PRICES[A])).see(1.0)
    assert story.hear(TargetSet(1.0, {FLEX: 1, A: 1})).asks() == [(A, 1)]


def test_a_queued_request_is_for_all_instances_or_none():
    assert Story().see(1.0).hear(TargetSet(1.0, {FLEX: 8})).asks() == [(FLEX, 8)]
    story = Story(CapacityPolicy(usd_per_hour_max=7 * PRICES[FLEX])).see(1.0)
    assert story.hear(TargetSet(1.0, {FLEX: 8})).asks() == []
    assert story.hear(TargetSet(2.0, {FLEX: 7})).asks() == [(FLEX, 7)]


def test_a_queued_request_is_withdrawn_before_a_budget_pauses_the_job():
    """The request is wanted, but goes first: it costs nothing and trains nothing."""
    story = Story(CapacityPolicy(usd_max=2.0)).see(11.0, instance(1))
    agents = {"n1": Agent(4)}
    story.count(60.0, agents, frozenset(agents)).hear(TargetSet(61.0, {A: 1, FLEX: 3}))
    (order,) = story.of(Create)
    id_, at = order.ask.request_id, 62.0
    story.hear(RequestAnswered(at, Queued(id_)))
    while not story.of(Cancel):
        assert story.of(PauseJob) == []
        at += 10.0
        story.see(at, instance(1), queued={id_: order.ask})
    assert (story.of(Drain), story.of(PauseJob)) == ([], [])
    while not story.of(PauseJob):
        at += 10.0
        story.see(at, instance(1), refused=(Refused(id_, "unknown", "cancelled"),))
        assert story.asks() == []
    assert spent_usd(story.state) == pytest.approx(1.8, abs=0.02)


def test_a_request_being_withdrawn_drains_nothing():
    """Its cost ends with it, so the job keeps what it uses."""
    story = Story(CapacityPolicy(usd_max=2.0)).see(11.0, instance(1))
    agents = {"n1": Agent(4)}
    story.count(60.0, agents, frozenset(agents)).hear(TargetSet(61.0, {FLEX: 3}))
    (order,) = story.of(Create)
    id_, at = order.ask.request_id, 62.0
    story.hear(RequestAnswered(at, Queued(id_)))
    while not story.of(Cancel):
        at += 10.0
        story.see(at, instance(1), queued={id_: order.ask})
    assert story.of(Drain) == []
