"""Single decisions about the queue and operators' orders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from agents.protocol.records import FIRST, JobId, JobPast, JobState, Order, OrderKind
from sailord.core import learn
from sailord.core.decide import decide
from sailord.core.model.commands import (
    Command,
    GiveOrder,
    Note,
    RequestPlan,
    SettleOrder,
    WakeAgents,
    WriteGeneration,
    WriteJob,
)
from sailord.core.model.events import (
    Elected,
    GenerationWritten,
    JobSubmitted,
    NodesObserved,
    OrderGiven,
    PlanFound,
    PlanRefused,
    Reported,
    Ticked,
)
from sailord.core.model.nodes import Nodes
from sailord.core.model.phases import Closing, Held, Opening, Running, Stopping, Waiting
from sailord.core.model.state import State
from sailord.core.order_validation import why_without_effect
from sailord.core.queries.replan_triggers import pending_rollback, why_waiting
from sailord.core.rules.transitions import finish
from tests.sailord.core.states import (
    BEGAN,
    FROM_NOTHING,
    JOB,
    KEPT,
    NOW,
    TERM,
    A,
    B,
    C,
    D,
    G,
    Planning,
    act,
    active_of,
    changed,
    durable,
    job,
    node,
    order,
    phase,
    proposal,
    record,
    report,
    state,
)

# ---- jobs and orders ------------------------------------------------------------------------


def queue(*jobs: tuple[str, int, float]) -> State:
    """A leader and jobs that wait: name, priority, when they came."""
    made = {
        JobId(name): job(id=JobId(name), state="queued", priority=priority, submitted_at=at)
        for name, priority, at in jobs
    }
    return State(now=NOW, term=TERM, jobs=made, nodes=Nodes({A: node(A)}))


@pytest.mark.parametrize(
    ("jobs", "first"),
    [
        ([("late", 0, 2.0), ("early", 0, 1.0)], "early"),
        ([("late", 1, 2.0), ("early", 0, 1.0)], "late"),
        ([("b", 0, 1.0), ("a", 0, 1.0)], "a"),
    ],
)
def test_queue_order_is_priority_then_age(jobs: list[tuple[str, int, float]], first: str) -> None:
    after, commands = act(queue(*jobs), Ticked(NOW))
    assert active_of(after).job == first
    assert commands == (WriteJob(after.job),)
    assert after.job.state == "running"


def test_second_submission_changes_nothing() -> None:
    once, _ = act(state(), JobSubmitted(NOW, job(id=JobId("other"), state="queued")))
    twice, commands = act(
        once, JobSubmitted(NOW, job(id=JobId("other"), state="queued", priority=9))
    )
    assert twice == once
    assert commands == ()


def test_active_job_is_not_queued_again() -> None:
    after, _ = act(state(), JobSubmitted(NOW, job(state="queued")))
    assert after.jobs == {JOB: job()}


def test_next_job_gets_the_cluster_after_one_is_done() -> None:
    closed = replace(G, state="closed")
    before = state(Closing("done", "all steps"), generation=closed).with_job(
        job(id=JobId("other"), state="queued")
    )
    after, commands = act(before, Ticked(NOW))
    assert active_of(after).job == "other"
    assert after.generations == {JOB: closed}
    begun = {"state": "running", "reason": "next in the queue", "past": JobPast(since=NOW)}
    assert commands == (
        WriteJob(job(state="done", reason="all steps")),
        WriteJob(job(id=JobId("other"), **begun)),
        WakeAgents((A, B)),
    )


def test_job_is_done_after_its_last_step_with_all_parked() -> None:
    done = job(steps=40)
    assert isinstance(phase(act(state(job=done), Ticked(NOW))[0]), Running)
    nodes = (node(A, report(A, "stopped")), node(B, report(B, "stopped")))
    after, _ = act(state(None, *nodes, job=done), Ticked(NOW))
    assert phase(after) == Closing("done", "all 40 steps are done")


def test_order_is_carried_out_once() -> None:
    once, first = act(state(), OrderGiven(NOW, order("pause")))
    twice, second = act(once, OrderGiven(NOW, order("pause")))
    stopping = replace(G, state="stopping", stop_at=41, reason="pause was ordered")
    assert first == (WriteGeneration(stopping, replaces=G),)
    assert (twice, second) == (once, ())


@pytest.mark.parametrize(("later", "then"), [("cancel", "cancelled"), ("resume", "paused")])
def test_pause_waiting_for_its_checkpoint_yields_to_a_later_order(
    later: OrderKind, then: JobState
) -> None:
    kept = job(saving=KEPT)
    paused, _ = act(state(job=kept), OrderGiven(NOW, order("pause")))
    stopping = replace(G, state="stopping", stop_at=41, reason="pause was ordered")
    waits, _ = act(paused, GenerationWritten(NOW, stopping))
    for id_ in (A, B):
        waits, _ = act(waits, Reported(NOW, report(id_, "stopped", number=9, sealed=(39, 40))))
    assert isinstance(phase(waits), Stopping)
    after, _ = act(waits, OrderGiven(NOW, replace(order(later), id="later")))
    assert phase(after) == Closing(
        then, f"{'cancel' if later == 'cancel' else 'pause'} was ordered"
    )


def test_cancel_is_settled_after_the_end_is_stored() -> None:
    after, commands = act(state(), OrderGiven(NOW, order("cancel")))
    closed = replace(G, state="closed", reason="cancel was ordered")
    assert commands == (WriteGeneration(closed, replaces=G),)
    after, commands = act(after, GenerationWritten(NOW, closed))
    assert SettleOrder("order") in commands
    assert after.active is None
    assert after.jobs[JOB].state == "cancelled"


def test_resume_ends_hold_and_clears_failures() -> None:
    before = state(Held("too many", NOW - 9), job=job(state="held"), failures=5, not_before=NOW + 9)
    after, commands = act(before, OrderGiven(NOW, order("resume")))
    assert (active_of(after).attempts.failures, active_of(after).phase) == (
        0,
        Waiting("resume was ordered", NOW),
    )
    assert SettleOrder("order") in commands


def test_only_an_order_ends_hold() -> None:
    before = state(Held("too many", NOW - 9), node(A), node(B, lost_at=NOW - 1))
    after, commands = act(before, Ticked(NOW + 10_000))
    assert (phase(after), commands) == (phase(before), ())


@pytest.mark.parametrize(
    ("kind", "was", "becomes"),
    [
        ("cancel", "queued", "cancelled"),
        ("pause", "queued", "paused"),
        ("resume", "paused", "queued"),
        ("cancel", "paused", "cancelled"),
        ("resume", "done", "done"),
        ("cancel", "done", "done"),
    ],
)
def test_orders_about_a_job_without_the_cluster(kind: str, was: str, becomes: str) -> None:
    other = JobId("other")
    before = state().with_job(job(id=other, state=was))
    after, commands = act(before, OrderGiven(NOW, order(kind, other)))
    assert after.jobs[other].state == becomes
    assert SettleOrder("order") in commands


@pytest.mark.parametrize("kind", ["preempt", "drain"])
def test_notice_by_name_or_id_marks_one_node(kind: str) -> None:
    for target in (B, "machine-b"):
        after, _ = act(state(), OrderGiven(NOW, order(kind, target, leaves_at=NOW + 30)))
        assert after.nodes[B].exclusion.draining_since == NOW
        assert after.nodes[B].record.leaves_at == NOW + 30
        assert after.nodes[A].exclusion.draining_since is None


def test_withdrawn_notice_leaves_no_mark() -> None:
    warned, _ = act(state(), OrderGiven(NOW, order("preempt", B, leaves_at=NOW + 30)))
    after, _ = act(warned, OrderGiven(NOW, order("withdraw", B, "another")))
    assert after.nodes[B] == replace(state().nodes[B], returned_at=NOW)


def test_node_back_after_an_expired_lease_keeps_its_marks() -> None:
    """Its agent was away for longer than the lease, and no order took the mark back."""
    before = state(None, node(A), node(B), node(C))
    for kind in ("cordon", "drain", "quarantine"):
        said = order(kind, "machine-c" if kind == "cordon" else C, kind, reason="it limps")
        before, _ = act(before, OrderGiven(NOW, said))
    without = (node(A).record, node(B).record)
    gone, _ = act(before, NodesObserved(NOW + 1, without))
    assert C not in gone.nodes
    back, _ = act(gone, NodesObserved(NOW + 2, (*without, node(C).record)))
    marked = back.nodes[C]
    assert (
        marked.exclusion.is_cordoned,
        marked.exclusion.draining_since,
        marked.exclusion.slow,
    ) == (True, NOW + 2, "it limps")


def test_lost_node_that_reports_keeps_its_marks() -> None:
    before, _ = act(state(), OrderGiven(NOW, order("cordon", B)))
    lost = changed(before.nodes[B], lost_at=NOW)
    before = replace(before, nodes=before.nodes.with_({B: lost}))
    after, _ = act(before, Reported(NOW, report(B, number=6)))
    assert (after.nodes[B].is_lost, after.nodes[B].exclusion.is_cordoned) == (False, True)


def test_order_by_name_does_not_apply_to_the_next_node_of_that_name() -> None:
    before, commands = act(state(), OrderGiven(NOW, order("preempt", "machine-b")))
    (meant,) = [each.order for each in commands if isinstance(each, GiveOrder)]
    assert (meant.target, meant.life) == ("machine-b", B)
    again = replace(node(D).record, name="machine-b")
    there = (node(A).record, again)
    after, _ = act(before, NodesObserved(NOW + 1, there))
    assert (after.nodes[B].is_lost, after.nodes[D].exclusion.draining_since) == (True, None)
    took = Elected(NOW + 2, 9, nodes=there, jobs=(job(),), generations=(G,), orders=(meant,))
    led, _ = act(state(), took)
    assert led.nodes[D].exclusion.draining_since is None, "a new leader knows whom it meant"


def test_oldest_orders_about_lost_nodes_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learn, "MARKS_MAX", 3)
    given = [order("preempt", f"gone-{i}", f"order-{i}") for i in range(3)]
    given.insert(1, order("cordon", A, "of-one-that-is-there"))
    after, commands = act(state(), OrderGiven(NOW, given[0], tuple(given[1:])))
    assert list(after.marks) == [A, "gone-1", "gone-2"]
    assert SettleOrder("order-0") in commands


def test_simultaneous_orders_apply_once_and_in_order() -> None:
    notice = order("preempt", "machine-b", "first", leaves_at=NOW + 30)
    given = [notice, order("withdraw", B, "second"), notice, order("drain", A, "third")]
    given += [order("pause", JOB, "fourth"), order("pause", JOB, "fourth")]
    together, commands = act(state(), OrderGiven(NOW, given[0], tuple(given[1:])))
    one_by_one = state()
    for each in given[:5]:
        one_by_one, last = act(one_by_one, OrderGiven(NOW, each))
    meant = GiveOrder(replace(notice, life=B))
    assert (together, commands) == (one_by_one, (meant, *last))
    assert together.nodes[B] == replace(state().nodes[B], returned_at=NOW)
    assert together.nodes[A].exclusion.draining_since == NOW


@pytest.mark.parametrize("kind", ["resume", "pause", "replan", "checkpoint"])
def test_rules_converge_with_many_orders(kind: str) -> None:
    orders = tuple(order(kind, JOB, f"order-{i}") for i in range(200))
    for before in (state(), state(Held("too many", NOW - 9))):
        act(before, OrderGiven(NOW, orders[0], orders[1:]))


def test_cordon_keeps_members_but_no_new_plan_uses_the_node() -> None:
    before = state(None, node(A), node(B), replace(node(C, report(C, "idle")), since=NOW - 99))
    after, commands = act(before, OrderGiven(NOW, order("cordon", C)))
    assert (phase(after), commands) == (Running(BEGAN), ())
    after, commands = act(state(), OrderGiven(NOW, order("cordon", B)))
    assert (phase(after), commands) == (Running(BEGAN), ())


CORDONED = node(B, is_cordoned=True)
FRESH = replace(node(C, report(C, "idle")), since=NOW - 60)


def test_better_plan_does_without_a_cordoned_member() -> None:
    """It had 29 s of peace, until two nodes joined and a new plan gave it more layers."""
    _, (asked,) = act(state(None, node(A), CORDONED, FRESH), Ticked(NOW))
    assert isinstance(asked, RequestPlan)
    assert (asked.nodes, asked.slow) == ((A, C), {B: 1.0})


def test_plan_that_an_operator_orders_does_without_a_cordoned_member() -> None:
    before = state(None, node(A), CORDONED)
    after, (_, asked) = act(before, OrderGiven(NOW, order("replan")))
    assert isinstance(asked, RequestPlan)
    assert (asked.nodes, asked.slow) == ((A,), {B: 1.0})
    stays, commands = act(after, PlanFound(NOW, asked.request, proposal(A, is_worth_it=False)))
    assert (phase(stays), commands) == (Running(BEGAN), ())
    moves, _ = act(after, PlanFound(NOW, asked.request, proposal(A)))
    assert isinstance(phase(moves), Stopping)


def test_cordoned_member_may_stay_where_an_ordered_plan_has_to_replace_another() -> None:
    leaves = node(C, draining_since=NOW - 9)
    before = state(None, node(A), CORDONED, leaves, generation=replace(G, members=(A, B, C)))
    after, (_, asked) = act(before, OrderGiven(NOW, order("replan")))
    assert isinstance(asked, RequestPlan)
    assert (asked.nodes, asked.slow) == ((A, B), {})
    assert active_of(after).question.is_forced


def test_plan_after_a_loss_may_keep_a_cordoned_member() -> None:
    lost = node(C, lost_at=NOW - 1, why_lost="x")
    record = replace(G, members=(A, B, C))
    waits = Waiting("c is lost", NOW - 1)
    _, (asked,) = act(state(waits, node(A), CORDONED, lost, generation=record), Ticked(NOW))
    assert isinstance(asked, RequestPlan)
    assert (asked.nodes, asked.slow) == ((A, B), {})


def test_job_whose_nodes_are_all_cordoned_goes_on_there() -> None:
    alone = state(None, node(A, is_cordoned=True), CORDONED)
    _, (_, asked) = act(alone, OrderGiven(NOW, order("replan")))
    assert isinstance(asked, RequestPlan)
    assert (asked.nodes, asked.slow) == ((A, B), {})


def test_paused_job_is_resumed_without_cordoned_nodes() -> None:
    """Nothing runs on them any more."""
    closed = replace(G, state="closed")
    before = state(Waiting("next in the queue", NOW - 9), node(A), CORDONED, generation=closed)
    _, (asked,) = act(before, Ticked(NOW))
    assert isinstance(asked, RequestPlan)
    assert asked.nodes == (A,)


def test_replan_order_asks_the_planner() -> None:
    after, commands = act(state(), OrderGiven(NOW, order("replan")))
    assert commands == (SettleOrder("order"), RequestPlan(1, JOB, (A, B), G))
    assert phase(after) == Planning(
        1, (A, B), "a new plan was ordered", True, NOW + 60, is_ordered=True
    )


def test_first_generation_begins_at_step_0() -> None:
    before = state(FROM_NOTHING, generation=None, step=0)
    after, commands = act(before, PlanFound(NOW, 4, proposal()))
    opening = phase(after)
    assert isinstance(opening, Opening)
    assert (opening.record.number, opening.record.restore) == (1, FIRST)
    assert commands == (WriteGeneration(opening.record, replaces=None),)


# ---- what is told of each ---------------------------------------------------------------------


def told(commands: Iterable[Command]) -> list[str]:
    return [f"{c.job} {c.text}" for c in commands if isinstance(c, Note) and c.is_transition]


def test_each_job_state_is_noted_with_its_reason() -> None:
    waits = queue(("j", 0, 1.0))
    new = job(id=JobId("k"), state="queued", submitted_at=2.0, reason="submitted")
    after, commands = decide(waits, JobSubmitted(NOW, new))
    assert told(commands) == ["j running: next in the queue", "k queued: submitted"]
    for kind, became in (("pause", "paused"), ("resume", "queued"), ("cancel", "cancelled")):
        order = Order(f"i-{kind}", kind, "k", reason=f"{kind}: because")  # type: ignore[arg-type] # one of the kinds
        after, commands = decide(after, OrderGiven(NOW, order))
        assert told(commands) == [f"k {became}: {kind}: because"]


def test_new_leader_repeats_no_notes() -> None:
    jobs = (job(id=JobId("j"), state="queued"), job(id=JobId("k"), state="paused"))
    _, commands = decide(State(now=NOW), Elected(NOW, TERM, nodes=(), jobs=jobs, generations=()))
    assert told(commands) == ["j running: next in the queue"]


PAUSED = replace(
    state().with_job(job(state="paused", saving=KEPT)),
    active=None,
    generations={JOB: replace(G, state="closed")},
    durables={JOB: durable(30)},
)
BACK = order("rollback", id_="back", durable=durable(20))


def resumed(before: State) -> State:
    """The job gets the cluster again, and its plan is found."""
    after, _ = act(before, OrderGiven(NOW, order("resume", id_="resume")))
    after, _ = act(after, Ticked(NOW + 5))
    return act(after, PlanFound(NOW + 6, after.requests, proposal()))[0]


def test_paused_job_is_rolled_back_where_it_is_resumed() -> None:
    """Its bad weights need not train first."""
    assert why_without_effect(PAUSED, BACK) is None
    ordered, commands = act(PAUSED, OrderGiven(NOW, BACK))
    assert (commands, ordered.active) == ((), None)
    assert pending_rollback(ordered, JOB) == BACK.durable
    waits, _ = act(ordered, OrderGiven(NOW, order("resume", id_="resume")))
    assert pending_rollback(waits, JOB) == BACK.durable
    opening = phase(resumed(ordered))
    assert isinstance(opening, Opening)
    assert (opening.record.restore.point, opening.lowers) == (BACK.durable.point, BACK.durable)
    assert resumed(ordered).rollbacks == {}


def test_new_leader_keeps_the_rollback_of_a_paused_job() -> None:
    paused = PAUSED.jobs[JOB]
    nodes, closed = (record(A), record(B)), (PAUSED.generations[JOB],)
    kept = ((JOB, durable(30)),)
    took = Elected(
        NOW, TERM, nodes=nodes, jobs=(paused,), generations=closed, durables=kept, orders=(BACK,)
    )
    after, commands = act(State(), took)
    assert (after.rollbacks, commands) == ({JOB: BACK}, ())


def test_last_rollback_of_a_paused_job_counts_until_it_is_cancelled() -> None:
    once, _ = act(PAUSED, OrderGiven(NOW, order("rollback", id_="first", durable=durable(10))))
    twice, commands = act(once, OrderGiven(NOW, BACK))
    assert commands == (SettleOrder("first"),)
    ended, commands = act(twice, OrderGiven(NOW, order("cancel", id_="cancel")))
    assert ended.rollbacks == {}
    settled = [each.id for each in commands if isinstance(each, SettleOrder)]
    assert settled == ["back", "cancel"]


def test_pause_overtakes_a_rollback_that_waits_for_a_plan() -> None:
    ordered, _ = act(PAUSED, OrderGiven(NOW, BACK))
    waits, _ = act(ordered, OrderGiven(NOW, order("resume", id_="resume")))
    asked, _ = act(waits, Ticked(NOW + 5))
    refused, _ = act(asked, PlanRefused(NOW + 6, asked.requests, "too few nodes"))
    after, commands = act(refused, OrderGiven(NOW + 7, order("pause", id_="pause")))
    assert (after.active, after.jobs[JOB].state) == (None, "paused")
    assert after.rollbacks == {JOB: BACK}
    assert [each.id for each in commands if isinstance(each, SettleOrder)] == ["pause"]


def test_rollback_that_was_pending_before_a_hold_waits_for_a_resume() -> None:
    waits = Waiting("machine-b is lost", NOW - 1)
    before = state(waits, node(A), orders=(BACK,), generation=replace(G, state="closed"))
    held = finish(before, active_of(before), "held", "no node can be prepared").state
    after, _ = act(held, Ticked(NOW + 9))
    assert isinstance(phase(after), Held)
    assert active_of(after).orders == (BACK,)
    later = replace(BACK, id="later")
    for new, left in ((order("resume", id_="on"), (BACK,)), (later, (BACK, later))):
        again, _ = act(after, OrderGiven(NOW + 9, new))
        assert isinstance(phase(again), Waiting)
        assert active_of(again).orders == left


def test_rollback_that_was_pending_before_a_hold_waits_for_a_resume_under_a_new_leader() -> None:
    closed = replace(G, state="closed")
    kept = job(state="held", reason="no node can be prepared")
    elected = Elected(
        NOW, TERM + 1, nodes=(node(A).record,), jobs=(kept,), generations=(closed,), orders=(BACK,)
    )
    led, _ = decide(State(), elected)
    after, _ = decide(led, Ticked(NOW + 9))
    assert isinstance(phase(after), Held)
    assert active_of(after).orders == (BACK,)
    again, _ = decide(after, OrderGiven(NOW + 9, order("resume", id_="on")))
    assert isinstance(phase(again), Waiting)


def test_rollback_that_was_ordered_while_the_job_waits_is_shown_and_is_the_reason_later() -> None:
    waits = Waiting("machine-b is lost", NOW - 1)
    back = order("rollback", durable=durable(20))
    before = state(waits, node(A), is_refused=True, considered=frozenset((A,)), considered_at=NOW)
    after, commands = act(before, OrderGiven(NOW, back))
    assert commands == (), "there are still too few nodes"
    pending = "machine-b is lost; a rollback to step 20 was ordered"
    active = active_of(after)
    assert isinstance(active.phase, Waiting)
    assert why_waiting(after, active, active.phase) == pending
    grown = replace(after, nodes=Nodes({A: node(A), C: node(C)}))
    asked, _ = act(grown, Ticked(NOW + 1))
    reason = "a rollback to step 20 was ordered; machine-b is lost"
    assert active_of(asked).question.reason == reason
    refused, _ = act(asked, PlanRefused(NOW + 1, 1, "too few"))
    again, _ = act(replace(refused, nodes=before.nodes), Ticked(NOW + 2))
    assert active_of(again).question.reason == reason, "it is told once"
