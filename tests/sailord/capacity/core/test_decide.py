"""The capacity decisions, one rule at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.codec import decode, encode
from sailord.capacity.core.budget import spent_usd, usd_per_hour
from sailord.capacity.core.cooldowns import cooldown_of
from sailord.capacity.core.decide import decide, record_of
from sailord.capacity.core.model import (
    Agent,
    AgentsCounted,
    CapacityPolicy,
    CapacityRecord,
    CapacityState,
    Create,
    DeleteInstances,
    Drain,
    JobProgress,
    Log,
    Observed,
    PauseJob,
    PricesRead,
    ProgressSeen,
    QuotasRead,
    RequestAnswered,
    StockReported,
    TargetSet,
    Tick,
    TookOver,
    request_id_of,
)
from sailord.capacity.core.rented_instance import RETURN_S
from sailord.capacity.core.supply import obtainable, supply
from sailord.providers.gce.requests import request_uuid
from sailord.providers.interface import (
    Granted,
    InDoubt,
    Observation,
    Preemption,
    QuotaUsage,
    Refused,
)
from tests.sailord.capacity.core.story import FIRST, PRICES, SECOND, A, B, Story, instance


def test_no_request_before_the_first_observation():
    story = Story().hear(TargetSet(1.0, {A: 2}))
    assert story.asks() == []
    assert story.see(2.0).asks() == [(A, 2)]


def test_an_open_request_of_the_last_leader_counts_as_granted_until_observed():
    first = Story().see(1.0).hear(TargetSet(1.0, {A: 2}))
    story = Story(books=record_of(first.state)).hear(TargetSet(2.0, {A: 2}))
    assert story.see(50.0).asks() == []
    assert story.see(200.0).asks() == []  # It came to nothing, and its pool rests a while.
    assert not story.state.asks
    assert story.hear(Tick(500.0)).asks() == [(A, 2)]


def test_a_new_leader_counts_instances_of_an_open_request_once():
    policy = CapacityPolicy(usd_max=1.0)
    first = Story(policy).see(1.0).hear(TargetSet(1.0, {A: 4}))
    (order,) = first.of(Create)
    # As the provider labels instances, for later leaders to read.
    label = request_uuid(order.ask.request_id)
    made = [instance(number, request=label, at=5.0) for number in range(4)]
    story = Story(policy, record_of(first.state)).hear(TargetSet(20.0, {A: 4}))
    assert story.see(20.0, *made).orders == ()
    assert not story.state.asks
    assert supply(story.state)[A] == 4
    assert usd_per_hour(story.state) == pytest.approx(4 * PRICES[A])
    story.hear(AgentsCounted(40.0, {f"n{number}": Agent(4) for number in range(4)}))
    assert story.see(40.0, *made).orders == (), "all of them stay"
    story.see(200.0, *made)
    assert not story.state.cooldowns, "it was answered"


def test_two_leaders_never_use_the_same_request_id():
    ids = {request_id_of(prefix, number) for prefix in ("a", "b") for number in range(9)}
    assert len(ids) == 18


def test_a_request_in_doubt_is_settled_when_its_operation_ends():
    story = Story().see(1.0).hear(TargetSet(1.0, {A: 2}))
    story.hear(RequestAnswered(5.0, InDoubt(FIRST)))
    story.see(20.0, instance(), pending_requests=frozenset({FIRST}))
    assert story.asks() == []
    assert story.see(30.0, instance()).asks() == [(A, 1)]


def test_a_request_in_doubt_that_made_some_causes_no_cooldown():
    story = Story().see(1.0).hear(TargetSet(1.0, {A: 2}))
    story.hear(RequestAnswered(5.0, InDoubt(FIRST)))
    hung = frozenset({FIRST})
    assert story.see(100.0, instance(), pending_requests=hung).asks() == []
    assert story.see(130.0, instance(), pending_requests=hung).asks() == [(A, 1)]
    assert [order.text for order in story.of(Log)] == [f"{FIRST} made 1 of 2: {A}"]


@pytest.mark.parametrize("answer", [InDoubt(FIRST, "no end within 180 s"), Granted(FIRST, ())])
def test_a_request_in_doubt_is_awaited_from_when_its_answer_failed_to_come(answer):
    story = Story().see(1.0).hear(TargetSet(1.0, {A: 1})).see(180.0)
    story.hear(RequestAnswered(181.0, answer))
    assert set(story.state.asks) == {FIRST}
    again = decode(CapacityRecord, encode(record_of(story.state)))
    took_over = Story(books=again, at=182.0).hear(TargetSet(182.0, {A: 1}))
    for later, over_at in ((story, 301.0), (took_over, 302.0)):
        assert later.see(over_at - 1.0).asks() == []
        assert set(later.state.asks) == {FIRST}
        later.see(over_at)
        assert not later.state.asks


def test_a_request_in_doubt_is_not_given_up_while_its_zone_is_not_seen():
    story = Story(CapacityPolicy(usd_per_hour_max=7.2)).see(1.0).hear(TargetSet(1.0, {A: 2}))
    story.hear(RequestAnswered(5.0, InDoubt(FIRST)))
    for at in range(10, 310, 10):
        assert story.see(float(at), unseen_zones=("zone-a",)).asks() == []
        assert set(story.state.asks) == {FIRST}
    before = story.state
    assert story.see(310.0, instance(1), instance(2)).asks() == []
    assert story.state.asks == {}
    story.state = before
    for at in range(310, 480, 10):
        assert story.see(float(at)).asks() == [], "it may come yet, then its pool rests"
    assert story.see(480.0).asks() == [(A, 2)]


def test_nothing_is_requested_in_a_zone_that_is_not_seen():
    story = Story().see(1.0, unseen_zones=("zone-a",)).hear(TargetSet(1.0, {A: 1, B: 1}))
    assert story.asks() == [(B, 1)]
    assert story.see(11.0).asks() == [(A, 1)]


def test_a_pool_whose_zone_is_not_seen_for_long_counts_as_out_of_stock():
    story = Story().see(1.0, unseen_zones=("zone-a",)).see(110.0, unseen_zones=("zone-a",))
    assert obtainable(story.state, A) == CapacityPolicy().machines_per_pool_max
    story.see(121.0, unseen_zones=("zone-a",))
    assert obtainable(story.state, A) == 0
    cooldown = cooldown_of(story.state, A)
    assert cooldown is not None
    assert (cooldown.since, cooldown.text) == (
        1.0,
        "the provider does not say what runs in zone-a",
    )
    assert obtainable(story.see(131.0).state, A) == CapacityPolicy().machines_per_pool_max


def test_a_pool_has_one_open_request_at_a_time():
    story = Story().see(1.0).hear(TargetSet(1.0, {A: 1}))
    assert story.hear(TargetSet(2.0, {A: 3})).asks() == []


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        *(("stockout", 60), ("quota", 300), ("rate", 10), ("permission", 600)),
        *(("bad_request", 1800), ("unknown", 60)),
    ],
)
def test_a_cooldown_depends_on_the_refusal_and_doubles(kind, seconds):
    others = B, replace(A, machine="small"), replace(A, spot=False)
    story = Story().see(1.0).hear(PricesRead(1.0, PRICES | dict.fromkeys(others, 3.6)))
    story.hear(TargetSet(1.0, {A: 1})).hear(RequestAnswered(10.0, Refused(FIRST, kind, "no")))
    assert obtainable(story.state, A) == 0
    for other in others:  # Of zone, machine type and contract each has a rest of its own.
        assert obtainable(story.state, other) > 0
    assert story.hear(Tick(10.0 + seconds - 1)).asks() == []
    assert story.hear(Tick(10.0 + seconds)).asks() == [(A, 1)]
    now = 10.0 + seconds
    story.hear(RequestAnswered(now, Refused(SECOND, kind, "no")))
    assert story.hear(Tick(now + 2 * seconds - 1)).asks() == []
    assert story.hear(Tick(now + 2 * seconds)).asks() == [(A, 1)]


def test_open_requests_count_against_the_quota():
    quota = QuotaUsage("PREEMPTIBLE_GPUS", (A, B), 9.0, 0.0)
    story = Story().hear(QuotasRead(0.5, (quota,))).see(1.0).hear(TargetSet(1.0, {A: 2, B: 2}))
    assert story.asks() == [(A, 2)]


def test_no_request_before_quotas_are_read():
    state, _ = decide(CapacityState(), TookOver(0.0, "t1", CapacityRecord()))
    orders = ()
    for event in (
        PricesRead(1.0, PRICES),
        Observed(2.0, Observation(2.0, ())),
        TargetSet(3.0, {A: 1}),
    ):
        state, orders = decide(state, event)
        assert orders == ()
    assert obtainable(state, A) == 0
    _, orders = decide(state, QuotasRead(4.0, ()))
    assert [type(order) for order in orders] == [Create]


def test_a_pool_without_a_price_is_never_requested():
    other = replace(A, machine="rare")
    assert Story().see(1.0).hear(TargetSet(1.0, {other: 1})).asks() == []


def test_the_hourly_budget_counts_open_requests():
    policy = CapacityPolicy(usd_per_hour_max=11.0)
    story = Story(policy).see(1.0).hear(TargetSet(1.0, {A: 2, B: 1}))
    assert story.asks() == [(A, 2)]


def test_no_request_that_the_total_budget_cannot_pay_until_its_deletion():
    policy = CapacityPolicy(usd_max=0.19)  # 200 s of one instance of A are $0.20.
    assert Story(policy).see(1.0).hear(TargetSet(1.0, {A: 1})).asks() == []
    policy = CapacityPolicy(usd_max=0.21)
    assert Story(policy).see(1.0).hear(TargetSet(1.0, {A: 1})).asks() == [(A, 1)]


def test_a_spent_total_budget_stops_the_job_then_deletes_all():
    story = Story(CapacityPolicy(usd_max=3.6)).see(1.0).hear(TargetSet(1.0, {A: 1}))
    story.hear(RequestAnswered(10.0, Granted(FIRST, (instance(),))))
    story.hear(AgentsCounted(60.0, {"n1": Agent(4)}, frozenset({"n1"})))
    assert story.hear(Tick(3400.0)).of(PauseJob) == []
    story.hear(Tick(3430.0))
    assert len(story.of(PauseJob)) == 1
    assert story.of(DeleteInstances) == [], "it is being saved"
    assert story.hear(Tick(3530.0)).of(DeleteInstances) == [DeleteInstances(("1",))]
    later = Story(CapacityPolicy(usd_max=3.6), record_of(story.state)).see(3540.0)
    assert later.hear(TargetSet(3541.0, {A: 1})).asks() == []


def test_a_job_that_begins_once_the_budget_is_spent_is_paused_too():
    story = Story(CapacityPolicy(usd_max=3.6)).see(1.0).hear(TargetSet(1.0, {A: 1}))
    story.hear(RequestAnswered(10.0, Granted(FIRST, (instance(),))))
    story.hear(AgentsCounted(60.0, {"n1": Agent(4)}, frozenset({"n1"})))
    story.hear(ProgressSeen(61.0, running("first")))
    assert len(story.hear(Tick(3430.0)).of(PauseJob)) == 1
    assert story.hear(ProgressSeen(3431.0, running("first"))).of(PauseJob) == [], "ordered once"
    assert len(story.hear(ProgressSeen(3432.0, running("next"))).of(PauseJob)) == 1
    assert story.hear(ProgressSeen(3433.0, running("next"))).of(PauseJob) == []
    later = Story(CapacityPolicy(usd_max=3.6), record_of(story.state)).see(3434.0, instance())
    later.hear(AgentsCounted(3435.0, {"n1": Agent(4)}, frozenset({"n1"})))
    assert len(later.hear(ProgressSeen(3436.0, running("next"))).of(PauseJob)) == 1
    # On nodes that are not rented a job may go on.
    later.hear(AgentsCounted(3437.0, {"n1": Agent(4), "own": Agent(4)}, frozenset({"own"})))
    assert later.hear(ProgressSeen(3438.0, running("third"))).of(PauseJob) == []


def running(job: str) -> JobProgress:
    return JobProgress(job, 0.0, 1, None, None, is_running=True)


def test_only_instances_with_a_request_id_are_deleted():
    story = Story().see(1.0, instance(request=""))
    story.hear(AgentsCounted(1000.0, {}))
    assert story.see(2000.0, instance(request="")).of(DeleteInstances) == []
    assert supply(story.state)[A] == 1


@pytest.mark.parametrize("depends", ["in_use", "holding"])
def test_an_instance_that_lost_a_gpu_is_drained_before_it_is_deleted(depends):
    """Its memory may have the only copy of a state."""
    story = Story().see(11.0, instance()).hear(TargetSet(11.0, {A: 1}))
    story.hear(AgentsCounted(20.0, {"n1": Agent(4)}, frozenset({"n1"})))
    needed = {depends: frozenset({"n1"})}
    story.hear(AgentsCounted(40.0, {"n1": Agent(3)}, **needed))
    assert story.of(Drain) == [Drain("n1", "it has 3 of its 4 GPUs")]
    assert story.of(DeleteInstances) == []
    story.hear(AgentsCounted(50.0, {"n1": Agent(3, is_leaving=True)}, **needed))
    assert (story.of(Drain), story.of(DeleteInstances)) == ([], [])
    led = Story(books=decode(CapacityRecord, encode(record_of(story.state))))
    assert led.state.instances["1"].why == "", "a new leader has not counted agents yet"
    assert (
        led.hear(AgentsCounted(55.0, {"n1": Agent(3, is_leaving=True)}, **needed)).of(
            DeleteInstances
        )
        == []
    )
    assert led.hear(AgentsCounted(56.0, {"n1": Agent(3, is_leaving=True)})).of(DeleteInstances)
    story.hear(AgentsCounted(60.0, {"n1": Agent(3, is_leaving=True)}))
    assert story.of(DeleteInstances) == [DeleteInstances(("1",))]
    assert story.state.instances["1"].why == "it has 3 of its 4 GPUs"


def test_a_new_leader_repeats_stored_drains():
    story = Story().see(11.0, instance()).hear(TargetSet(11.0, {A: 0}))
    story.hear(AgentsCounted(20.0, {"n1": Agent(4)}, frozenset({"n1"}))).hear(Tick(320.0))
    later, orders = decide(CapacityState(), TookOver(330.0, "t2", record_of(story.state)))
    assert [type(order) for order in orders] == [Drain], "the job may stand on it"
    counted = AgentsCounted(340.0, {"n1": Agent(4)}, frozenset({"n1"}))
    later, orders = decide(later, counted)
    assert orders == ()
    _, orders = decide(later, AgentsCounted(350.0, {"n1": Agent(4, is_leaving=True)}))
    assert orders == (DeleteInstances(("1",)),)


def test_a_new_leader_deletes_nothing_before_agents_are_counted():
    story = Story(CapacityPolicy(usd_max=3.6)).see(11.0, instance())
    story.hear(AgentsCounted(60.0, {"n1": Agent(4)}, frozenset({"n1"}))).hear(Tick(3430.0))
    later = Story(CapacityPolicy(usd_max=3.6), record_of(story.state))
    assert later.hear(Tick(3440.0)).of(DeleteInstances) == []
    assert later.hear(AgentsCounted(3441.0, {"n1": Agent(4)})).of(DeleteInstances) == [
        DeleteInstances(("1",))
    ]


def test_a_replacement_is_requested_at_the_notice():
    story = Story().see(11.0, instance()).hear(TargetSet(11.0, {A: 1}))
    story.hear(AgentsCounted(20.0, {"n1": Agent(4)}))
    assert story.asks() == []
    assert story.hear(AgentsCounted(30.0, {"n1": Agent(4, is_leaving=True)})).asks() == [(A, 1)]


def _one_of_four_is_out() -> tuple[Story, dict[str, Agent]]:
    """Four are wanted, rented and joined; one is quarantined."""
    story = Story().see(11.0, *(instance(number) for number in range(1, 5)))
    agents = {f"n{number}": Agent(4) for number in range(1, 5)}
    story.hear(TargetSet(11.0, {A: 4})).hear(AgentsCounted(20.0, agents, frozenset(agents)))
    assert story.orders == ()
    return story, {**agents, "n4": Agent(4, is_out=True)}


def test_a_quarantined_instance_is_replaced_and_stays():
    story, agents = _one_of_four_is_out()
    story.hear(AgentsCounted(30.0, agents, frozenset({"n1", "n2", "n3"})))
    assert story.asks() == [(A, 1)]
    story.count(1000.0, agents, frozenset({"n1", "n2", "n3"}))
    assert (story.of(Drain), story.of(DeleteInstances)) == ([], [])


def test_a_quarantined_instance_goes_once_nothing_is_wanted():
    story, agents = _one_of_four_is_out()
    story.hear(AgentsCounted(30.0, agents)).hear(TargetSet(40.0, {}))
    assert story.count(330.0, agents).of(DeleteInstances) == []
    assert story.count(350.0, agents).of(DeleteInstances) == [DeleteInstances(("1", "2", "3", "4"))]


def test_a_preempted_instance_is_deleted_and_costs_nothing_more():
    story = Story().see(11.0, instance()).hear(TargetSet(11.0, {A: 1}))
    taken = (Preemption("1", 1010.0),)
    story.see(1020.0, instance(state="preempted"), preemptions=taken)
    assert story.of(DeleteInstances) == [DeleteInstances(("1",))]
    assert story.asks() == [(A, 1)]
    story = Story().see(11.0, instance())
    story.see(1020.0, instance(state="preempted"), preemptions=taken)
    assert spent_usd(story.state) == pytest.approx(1.0)
    story.see(1500.0, preemptions=taken, ended_at={"1": 1400.0})
    assert story.state.instances == {}
    assert spent_usd(story.state) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("agents", "at"),
    [({}, 640.0), ({"n1": Agent(3)}, 20.0)],
    ids=["never boots", "boots without a GPU"],
)
def test_a_faulty_instance_is_deleted_and_its_pool_cools_down(agents, at):
    story = Story().see(11.0, instance()).hear(TargetSet(11.0, {A: 1}))
    story.count(at, agents)
    assert story.of(DeleteInstances) == [DeleteInstances(("1",))]
    assert story.asks() == []
    assert obtainable(story.state, A) == 0


def test_an_instance_whose_agent_is_gone_is_deleted_and_replaced():
    story = Story().see(11.0, instance()).hear(TargetSet(11.0, {A: 1}))
    story.hear(AgentsCounted(20.0, {"n1": Agent(4)}))
    story.hear(AgentsCounted(30.0, {}))
    assert story.hear(AgentsCounted(30.0 + RETURN_S, {})).asks() == [(A, 1)]
    assert story.count(89.0, {}).of(DeleteInstances) == []
    assert story.hear(AgentsCounted(90.0, {})).of(DeleteInstances) == [DeleteInstances(("1",))]


def test_an_unseen_zone_leaves_its_instances_unchanged():
    story = Story().see(11.0, instance()).hear(TargetSet(11.0, {A: 1}))
    assert story.see(20.0, unseen_zones=("zone-a",)).asks() == []
    assert story.see(30.0).asks() == [(A, 1)]


def test_an_observation_older_than_an_instance_does_not_end_it():
    story = Story().see(1.0).hear(TargetSet(1.0, {A: 1}))
    story.hear(RequestAnswered(10.0, Granted(FIRST, (instance(),))))
    story.hear(Observed(12.0, Observation(9.0, ())))
    assert "1" in story.state.instances
    assert story.asks() == []


def test_an_observation_that_arrives_after_a_newer_one_is_ignored():
    story = Story(CapacityPolicy(usd_per_hour_max=7.2)).hear(TargetSet(1.0, {A: 2})).see(2.0)
    assert story.asks() == [(A, 2)]
    both = instance(1), instance(2)
    story.hear(RequestAnswered(9.0, Granted(FIRST, both))).see(11.0, *both)
    story.hear(Observed(12.0, Observation(5.0, ())))
    assert story.asks() == []
    assert [m.ended_at for m in story.state.instances.values()] == [None, None]


def test_cost_ends_at_the_time_that_the_provider_reports():
    story = Story().see(11.0, instance()).hear(TargetSet(11.0, {A: 1}))
    assert story.see(1020.0).asks() == [(A, 1)], "another takes its place at once"
    assert story.of(DeleteInstances) == []
    assert spent_usd(story.state) == pytest.approx(1.01)
    story.see(1030.0, ended_at={"1": 1010.0})
    assert story.state.instances == {}
    assert spent_usd(replace(story.state, asks={})) == pytest.approx(1.0)


def test_without_a_report_cost_ends_at_the_observation_that_missed_it():
    story = Story().see(11.0, instance()).see(1010.0).see(1500.0)
    assert story.state.instances == {}
    assert spent_usd(story.state) == pytest.approx(1.0)


def test_an_instance_missed_once_and_seen_again_costs_on():
    story = Story().see(11.0, instance()).see(1010.0).see(2010.0, instance())
    assert supply(story.state)[A] == 1
    assert spent_usd(story.state) == pytest.approx(2.0)


def test_an_observation_older_than_a_deletion_is_ignored():
    story = Story().see(11.0, instance()).see(1020.0, ended_at={"1": 1010.0})
    story.see(1015.0, instance())
    assert story.state.instances == {}
    assert spent_usd(story.state) == pytest.approx(1.0)


def test_a_preemption_reported_late_costs_until_its_time():
    story = Story().see(11.0, instance()).see(1020.0, instance(state="preempted"))
    assert spent_usd(story.state) == pytest.approx(1.01)
    story.see(1030.0, instance(state="preempted"), preemptions=(Preemption("1", 1010.0),))
    assert spent_usd(story.state) == pytest.approx(1.0)


def test_a_new_price_counts_from_now_on():
    story = Story().see(10.0, instance())
    story.hear(PricesRead(1010.0, {A: 7.2}))
    assert spent_usd(story.hear(Tick(2010.0)).state) == pytest.approx(3.0)


def test_old_refusals_do_not_count():
    story = Story().see(0.0)
    for at in (10.0, 10_000.0):
        story.hear(TargetSet(at, {A: 1}))
        request = request_id_of("t1", story.state.requests)
        story.hear(RequestAnswered(at, Refused(request, "stockout", "no")))
    rest = story.state.cooldowns[A]
    assert (rest.refusals, rest.since) == (1, 10_000.0)


@pytest.mark.parametrize(
    ("kind", "zone", "is_over"),
    [("stockout", "zone-a", True), ("stockout", "zone-b", False), ("quota", "zone-a", False)],
)
def test_reported_stock_ends_the_cooldown_after_a_stockout_there(kind, zone, is_over):
    story = Story().see(0.0).hear(TargetSet(10.0, {A: 1}))
    story.hear(RequestAnswered(10.0, Refused(FIRST, kind, "no")))
    assert (story.hear(StockReported(11.0, zone, "gpu")).asks() == [(A, 1)]) is is_over


def test_no_other_instance_is_requested_for_agents_that_were_away_for_a_moment():
    """After an outage of the store that outlasts their leases they register again."""
    story = Story().see(1.0).hear(TargetSet(1.0, {A: 2})).see(10.0, instance(1), instance(2))
    agents = {"n1": Agent(4), "n2": Agent(4)}
    assert story.hear(AgentsCounted(20.0, agents)).hear(AgentsCounted(30.0, {})).asks() == []
    assert story.hear(AgentsCounted(44.0, {"n1": Agent(4)})).asks() == []
    assert story.hear(AgentsCounted(45.0, {"n1": Agent(4)})).asks() == [(A, 1)]
