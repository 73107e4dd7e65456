"""Orders without effect are rejected with a reason; all others are accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agents.protocol.records import Bill, JobId, JobState, Order
from sailord.core.decide import decide
from sailord.core.model.commands import GiveOrder, Note, RequestPlan, SettleOrder, WriteJob
from sailord.core.model.events import Elected, GenerationWritten, OrderGiven, PlanRefused, Ticked
from sailord.core.model.nodes import Nodes
from sailord.core.model.phases import Closing, Held, Running, Stopping, Waiting
from sailord.core.model.state import State
from sailord.core.order_validation import why_without_effect
from sailord.core.queries.job_queue import in_queue
from tests.sailord.core.states import (
    BEGAN,
    FROM_NOTHING,
    JOB,
    KEPT,
    NOW,
    STOPPED,
    WAITING,
    A,
    B,
    G,
    act,
    active_of,
    job,
    node,
    order,
    phase,
    record,
    state,
)

OTHER = JobId("other")
CLOSED = replace(G, state="closed")
HELD = state(Held("it fails", NOW), generation=CLOSED)
PAUSING = state(
    Stopping("paused", "lunch", NOW + 9),
    generation=STOPPED,
    orders=(order("pause", id_="p"),),
)
KEEPS = state(Running(BEGAN), job=job(saving=KEPT))


def waits(of: JobState) -> State:
    """The job at hand runs; another one is in this state."""
    return state().with_job(job(id=OTHER, state=of))


def nodes(**others: object) -> State:
    return replace(state(), nodes=Nodes({A: node(A, **others), B: node(B)}))


USELESS = [
    (waits("queued"), "resume", OTHER, "it is queued", "when its turn comes"),
    (waits("queued"), "replan", OTHER, "it is queued", "when its turn comes"),
    (waits("paused"), "pause", OTHER, "it is paused", "resumed"),
    (waits("done"), "pause", OTHER, "it is done", "submit it again"),
    (waits("done"), "cancel", OTHER, "it is done", "submit it again"),
    (waits("cancelled"), "cancel", OTHER, "it is cancelled", "submit it again"),
    (waits("cancelled"), "resume", OTHER, "it is cancelled", "submit it again"),
    (waits("failed"), "pause", OTHER, "it is failed", "resumed"),
    (state(), "resume", JOB, "it has the cluster", "paused or cancelled"),
    (state(), "checkpoint", JOB, "no place for checkpoints", "[checkpoint]"),
    (PAUSING, "pause", JOB, "it is being paused", "resumed"),
    (PAUSING, "replan", JOB, "it is being paused", "resume"),
    (state(orders=(order("cancel"),)), "pause", JOB, "about to end", "status"),
    (state(Closing("done", "all done")), "cancel", JOB, "about to end", "status"),
    (HELD, "replan", JOB, "on hold", "resume"),
    (state(Waiting("b is lost", NOW), is_refused=True, job=job(saving=KEPT)), "checkpoint", JOB,
     "it waits for a plan: b is lost", "once the job runs"),
    (state(Waiting("none", NOW), generation=None, job=job(saving=KEPT)), "checkpoint", JOB,
     "does not run", "why"),
    (nodes(), "uncordon", "machine-a", "it is not cordoned", "cordoned"),
    (nodes(), "withdraw", "machine-a", "it is not draining", "drained"),
    (nodes(is_cordoned=True), "cordon", "machine-a", "cordoned already", "uncordon"),
    (nodes(draining_since=NOW, is_drain_ordered=True), "drain", A, "draining already", "withdraw"),
    (nodes(lost_at=NOW, why_lost="it is dead"), "drain", A, "lost (it is dead)", "back"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "kind", "target", "why", "cure"), USELESS)
def test_order_without_effect_is_rejected_with_a_hint(
    before: State, kind: str, target: str, why: str, cure: str
) -> None:
    problem = why_without_effect(before, order(kind, target))
    assert problem is not None
    assert problem.place in {target, "machine-a"}
    assert why in problem.what
    assert cure in problem.cure


USEFUL = [
    (waits("queued"), "pause", OTHER),
    (waits("queued"), "cancel", OTHER),
    (waits("paused"), "resume", OTHER),
    (waits("paused"), "cancel", OTHER),
    (waits("failed"), "resume", OTHER),
    (state(), "pause", JOB),
    (state(), "cancel", JOB),
    (state(), "replan", JOB),
    (KEEPS, "checkpoint", JOB),
    (PAUSING, "resume", JOB),
    (PAUSING, "cancel", JOB),
    (HELD, "resume", JOB),
    (HELD, "pause", JOB),
    (HELD, "cancel", JOB),
    (state(Closing("held", "it fails")), "resume", JOB),
    (nodes(), "drain", "machine-a"),
    (nodes(), "cordon", "machine-a"),
    (nodes(is_cordoned=True), "uncordon", "machine-a"),
    (nodes(draining_since=NOW), "withdraw", "machine-a"),
]


@pytest.mark.parametrize(("before", "kind", "target"), USEFUL)
def test_order_with_an_effect_is_accepted(before: State, kind: str, target: str) -> None:
    assert why_without_effect(before, order(kind, target)) is None
    after, _ = decide(before, OrderGiven(NOW, order(kind, target, "new")))
    is_kept = after.active is not None and any(each.id == "new" for each in after.active.orders)
    assert is_kept or has_effect(before, kind, target)


@pytest.mark.parametrize("case", USELESS)
def test_rejected_order_would_change_nothing(
    case: tuple[State, str, str, str, str],
) -> None:
    before, kind, target, *_ = case
    assert not has_effect(before, kind, target)


def has_effect(before: State, kind: str, target: str) -> bool:
    """The controller itself does something upon the order, once all else is at rest."""
    before, _ = decide(before, Ticked(NOW))
    after, commands = decide(before, OrderGiven(NOW, order(kind, target, "new")))
    acts = any(not isinstance(each, Note | SettleOrder | GiveOrder) for each in commands)
    return acts or (after.nodes, after.jobs, phase(after)) != (
        before.nodes, before.jobs, phase(before)
    )  # fmt: skip


def poor(before: State, usd: float) -> State:
    """The job has spent these dollars of $5; its generation costs $8 an hour."""
    spent = replace(before.job.bill, usd=usd, usd_max=5.0)
    assert before.active is not None
    ran = None if before.active.generation is None else replace(
        before.active.generation, usd_per_hour=8.0
    )  # fmt: skip
    before = replace(before, active=replace(before.active, generation=ran))
    return before.with_job(replace(before.job, bill=spent))


def parked(usd: float) -> State:
    """Another job runs; one that has spent these dollars of $5 is paused, and cost $8 an hour."""
    spent = job(id=OTHER, state="paused", bill=Bill(usd=usd, usd_max=5.0))
    ran = replace(G, job=OTHER, state="closed", usd_per_hour=8.0)
    return replace(state().with_job(spent), generations={OTHER: ran})


@pytest.mark.parametrize(
    ("before", "target"),
    [
        (poor(HELD, 5.0), JOB),
        (poor(PAUSING, 5.0), JOB),
        (poor(state(Closing("held", "it fails"), generation=CLOSED), 5.0), JOB),
        (parked(5.0), OTHER),
    ],
)
def test_a_job_that_has_spent_its_budget_is_not_resumed(before: State, target: str) -> None:
    problem = why_without_effect(before, order("resume", target))
    assert problem is not None
    assert problem.what == "resume would change nothing: its budget of $5.00 is spent"
    assert f"sailorctl budget {target} USD" in problem.cure
    assert not has_effect(before, "resume", target)


@pytest.mark.parametrize(
    ("before", "target"), [(poor(HELD, 4.6), JOB), (poor(PAUSING, 4.6), JOB), (parked(4.6), OTHER)]
)
def test_a_job_is_not_resumed_on_the_money_that_is_kept_for_saving_its_state(
    before: State, target: str
) -> None:
    before = replace(before, options=replace(before.options, reserve_s=170.0))
    assert why_without_effect(before, order("resume", target)) is None
    before = replace(before, options=replace(before.options, reserve_s=190.0))
    problem = why_without_effect(before, order("resume", target))
    assert problem is not None
    assert "$4.60 of its budget of $5.00 are spent, and the rest pays only for" in problem.what
    assert f"sailorctl budget {target} USD" in problem.cure


def budget(usd: float, target: str = JOB) -> Order:
    return replace(order("budget", target, "more"), usd_max=usd)


@pytest.mark.parametrize(
    ("before", "target"), [(poor(HELD, 5.0), JOB), (parked(5.0), OTHER)], ids=["held", "paused"]
)
def test_a_job_that_has_spent_its_budget_is_resumed_after_it_was_raised(
    before: State, target: str
) -> None:
    assert why_without_effect(before, budget(9.0, target)) is None
    after, commands = decide(before, OrderGiven(NOW, budget(9.0, target)))
    assert WriteJob(after.jobs[JobId(target)]) in commands
    assert SettleOrder("more") in commands
    assert after.jobs[JobId(target)].bill.usd_max == 9.0
    assert why_without_effect(after, order("resume", target)) is None
    assert has_effect(after, "resume", target)


def test_a_budget_below_what_the_job_has_cost_is_refused() -> None:
    problem = why_without_effect(poor(HELD, 4.6), budget(4.5))
    assert problem is not None
    assert problem.what == "$4.50 is not more than the $4.60 that it has cost"
    same = why_without_effect(poor(HELD, 4.6), budget(5.0))
    assert same is not None
    assert "it has that budget" in same.what
    ended = why_without_effect(waits("done"), budget(5.0, OTHER))
    assert ended is not None
    assert "it is done" in ended.what


def test_a_priority_moves_a_job_in_the_queue_and_takes_the_cluster_from_none() -> None:
    before = state()
    for number, name in enumerate(("one", "two")):
        before = before.with_job(job(id=JobId(name), state="queued", submitted_at=NOW + number))
    given = replace(order("priority", "two", "up"), priority=5)
    assert why_without_effect(before, given) is None
    after, commands = decide(before, OrderGiven(NOW, given))
    assert [job.id for job in in_queue(after)] == ["two", "one"]
    assert active_of(after).job == JOB
    assert WriteJob(after.jobs[JobId("two")]) in commands
    assert SettleOrder("up") in commands
    again = replace(order("priority", "two", "again"), priority=5)
    same = why_without_effect(after, again)
    assert same is not None
    assert "it has that priority" in same.what
    ended = why_without_effect(waits("done"), replace(given, target=OTHER))
    assert ended is not None
    assert "it is done" in ended.what


def test_a_job_without_a_plan_asks_for_one_once_its_budget_is_another() -> None:
    before = state(FROM_NOTHING)
    before, _ = act(before, PlanRefused(NOW, 4, "no plan keeps max_usd_total"))
    assert active_of(before).asked.is_refused
    _, commands = act(before, OrderGiven(NOW + 1, budget(9.0)))
    assert any(isinstance(each, RequestPlan) for each in commands)


def test_a_resume_beside_a_pause_does_not_queue_a_job_without_a_budget() -> None:
    before = poor(state(Closing("paused", "lunch"), generation=STOPPED), 5.0)
    before, _ = decide(before, OrderGiven(NOW, order("resume", id_="late")))
    after, _ = decide(before, GenerationWritten(NOW, replace(STOPPED, state="closed")))
    assert after.jobs[JOB].state == "paused"


def test_repeated_order_id_is_accepted() -> None:
    before = replace(waits("done"), known_orders=frozenset({"order"}))
    assert why_without_effect(before, order("cancel", OTHER)) is None


def test_follower_rejects_no_order() -> None:
    assert why_without_effect(replace(waits("done"), term=None), order("cancel", OTHER)) is None


def test_earlier_departure_time_has_an_effect() -> None:
    before = nodes(draining_since=NOW)
    assert why_without_effect(before, order("preempt", A, leaves_at=NOW + 30)) is None


def test_a_drain_of_the_agents_own_is_not_withdrawn_by_an_order() -> None:
    """Its record says `draining`, and would mark it again."""
    stopped = node(A, draining_since=NOW - 1)
    stopped = replace(stopped, record=replace(stopped.record, state="draining"))
    before = replace(state(), nodes=Nodes({A: stopped, B: node(B)}))
    said = why_without_effect(before, order("withdraw", A))
    assert said is not None
    assert "start sailor-agent there again" in said.cure
    assert why_without_effect(nodes(draining_since=NOW), order("withdraw", A)) is None


def test_a_budget_below_a_cent_is_refused_with_all_its_digits():
    spent = state(job=job(bill=Bill(usd=0.004, until=NOW)))
    problem = why_without_effect(spent, budget(0.001))
    assert "$0.001 is not more than the $0.004" in problem.what
    equal = why_without_effect(spent, budget(0.0038))
    assert "$0.003800 is not more than the $0.004000" in equal.what


# ---- what came of an order ----------------------------------------------------------------------


def outcomes(before: State, *kinds: str, **others: Any) -> list[tuple[str, tuple[str, ...]]]:
    """What is told of the ends of orders about the job, given in one go."""
    said = {kind: f"{kind} was ordered (by anna)" for kind in kinds}
    given = [order(kind, id_=kind, reason=said[kind], **others) for kind in kinds]
    _, commands = decide(before, OrderGiven(NOW, given[0], tuple(given[1:])))
    notes = [each for each in commands if isinstance(each, Note) and each.settled is not None]
    return [(each.text, each.settled.orders) for each in notes if each.settled is not None]


def test_an_order_that_changes_a_jobs_state_is_told_with_what_came_of_it() -> None:
    waits = state(WAITING, generation=None, is_refused=True)
    assert outcomes(waits, "pause") == [("paused: pause was ordered (by anna)", ("pause",))]
    queued = replace(waits, active=None, jobs={JOB: job(state="paused")})
    told = [("queued: resume was ordered (by anna)", ("resume",))]
    assert outcomes(replace(queued, unreadable=frozenset({JobId("x")})), "resume") == told


def test_an_order_that_acts_at_once_is_told_with_who_gave_it() -> None:
    text = "the budget of job is $250.00 now (by anna)"
    assert outcomes(state(), "budget", usd_max=250.0) == [(text, ("budget",))]
    text = "the priority of job is 9 now (by anna)"
    assert outcomes(state(), "priority", priority=9) == [(text, ("priority",))]
    drains = state(None, node(A, draining_since=NOW - 1), node(B))
    text = "machine-a drains no longer (by anna)"
    assert outcomes(drains, "withdraw", target=A) == [(text, ("withdraw",))]
    assert outcomes(state(), "withdraw", target=A) == [], "it did not drain"


def test_a_new_leader_does_not_tell_again_of_a_withdrawal() -> None:
    orders = tuple(order(kind, A, id_=kind) for kind in ("drain", "withdraw"))
    found = Elected(NOW, 9, nodes=(record(A),), jobs=(), generations=(), orders=orders)
    _, commands = decide(State(), found)
    assert not [each for each in commands if isinstance(each, Note)]
    known, _ = decide(State(), replace(found, orders=orders[:1]))
    _, commands = decide(known, OrderGiven(NOW, orders[1]))
    assert [each.text for each in commands if isinstance(each, Note)] == [
        "machine-a drains no longer"
    ]
