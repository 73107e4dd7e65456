"""Regressions: each of these once crashed the daemon, lost steps or hung."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agents.protocol.records import Holding, JobId, JobPast, NodeId, Point, Restore, Sealed
from agents.registration import choose
from sailord.core.decide import decide
from sailord.core.model.commands import (
    CollectGarbage,
    Command,
    Note,
    ProbeAgent,
    RequestPlan,
    Resign,
    SettleOrder,
    WriteGeneration,
    WriteJob,
    WriteManifest,
)
from sailord.core.model.events import (
    CommitFailed,
    Elected,
    Event,
    GenerationWritten,
    OrderGiven,
    PlanFound,
    ProbeFailed,
    Reported,
    Ticked,
    WriteRefused,
)
from sailord.core.model.phases import Closing, Held, Opening, Running, Starting, Stopping, Waiting
from sailord.core.model.state import State
from sailord.core.model.stragglers import NodeSpeeds, Straggler
from sailord.core.order_validation import why_without_effect
from tests.sailord.core.states import (
    BEGAN,
    FROM_NOTHING,
    JOB,
    KEPT,
    NOW,
    QUESTION,
    STOPPED,
    A,
    B,
    C,
    D,
    G,
    Planning,
    act,
    active_of,
    durable,
    generation,
    grouped,
    job,
    node,
    order,
    phase,
    proposal,
    report,
    state,
    uploaded,
)

LIMPS = Straggler(3.0, "others with the same work", NOW - 61, 10, 40)
SEES_A_LIMP = NodeSpeeds(3, 10, NOW - 0.5, {"A100-40": 1.0}, {}, {A: LIMPS})


def go_on(before: State, seconds: float, *, every_s: float = 0.1) -> tuple[State, list[Command]]:
    """Let time pass; return all commands meanwhile."""
    commands: list[Command] = []
    until = before.now + seconds
    while before.now < until:
        before, orders = act(before, Ticked(min(before.now + every_s, until)))
        commands += orders
    return before, commands


def planned(before: State, *members: NodeId) -> State:
    """Wait for the question, and answer it."""
    asked = before
    for _ in range(40):
        if isinstance(phase(asked), Planning):
            break
        asked, _ = act(asked, Ticked(asked.now + 0.1))
    question = phase(asked)
    assert isinstance(question, Planning)
    after, _ = act(asked, PlanFound(asked.now, question.request, proposal(*members)))
    return after


def restored(after: State) -> Restore:
    opening = phase(after)
    assert isinstance(opening, Opening), opening
    return opening.record.restore


def pieces(step: int, *layers: int) -> tuple[Sealed, ...]:
    """One snapshot of the third generation, of these layers."""
    return (Sealed(Point(step, 3), tuple(Holding(layer, 0, 1) for layer in layers)),)


# ---- orders that meet something else ------------------------------------------------------------

SPENT: dict[str, Any] = {"saving": KEPT, "bill": replace(job().bill, usd=5.01, usd_max=5.0)}
BACK = order("rollback", id_="back", durable=durable(20))


def test_rollback_of_an_overspent_job_is_refused() -> None:
    closed = replace(G, state="closed")
    before = state(Held("it is spent", BEGAN), job=job(state="held", **SPENT), generation=closed)
    problem = why_without_effect(before, BACK)
    assert problem is not None
    assert "is spent" in problem.what
    after, commands = act(before, OrderGiven(NOW, BACK))
    assert isinstance(phase(after), Held)
    assert SettleOrder("back") in commands
    said = [
        each.text for each in decide(before, OrderGiven(NOW, BACK))[1] if isinstance(each, Note)
    ]
    assert said == ["no rollback: its budget of $5.00 is spent"]


def test_budget_spent_during_a_rollback_holds_the_job() -> None:
    before = state(QUESTION, job=job(**SPENT), orders=(BACK,))
    after, _ = act(before, Ticked(NOW))
    assert isinstance(phase(after), Closing)
    after, commands = act(after, GenerationWritten(NOW + 1, replace(G, state="closed")))
    assert isinstance(phase(after), Held)
    assert SettleOrder("back") in commands


def test_replan_ordered_before_a_hold_is_settled() -> None:
    closed = replace(G, state="closed")
    held = state(Held("too many", BEGAN), job=job(state="held"), generation=closed,
                 orders=(order("replan", id_="first"),))  # fmt: skip
    after, commands = act(held, OrderGiven(NOW, order("resume", id_="second")))
    assert isinstance(phase(after), Waiting)
    assert {SettleOrder("first"), SettleOrder("second")} <= set(commands)


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        (("resume",), "queued"),
        (("resume", "pause"), "paused"),
        (("pause", "resume"), "queued"),
        (("cancel",), "cancelled"),
        (("resume", "cancel"), "cancelled"),
    ],
)
def test_order_given_while_a_pause_is_stored_counts(given: tuple[str, ...], becomes: str) -> None:
    first = order("pause", id_="first")
    before = state(Closing("paused", "lunch"), generation=STOPPED, orders=(first,))
    for kind in given:
        before, _ = act(before, OrderGiven(NOW, order(kind, id_=f"{kind}-{before.now}")))
    after, _ = act(before, GenerationWritten(NOW + 1, replace(STOPPED, state="closed")))
    states = {each.id: each.state for each in after.jobs.values()}
    if after.active is not None:  # The only queued job gets the cluster at once.
        states[after.active.job] = "queued"
    assert states == {JOB: becomes}


def test_rollback_is_refused_while_pausing() -> None:
    before = state(Stopping("paused", "lunch", NOW + 9), generation=STOPPED,
                   orders=(order("pause", id_="first"),))  # fmt: skip
    problem = why_without_effect(before, BACK)
    assert problem is not None
    assert "being paused" in problem.what


def test_ordered_replan_repeats_a_refused_question() -> None:
    before = state(Waiting("a reason", NOW - 50), node(A, report(A, "idle")), generation=None,
                   is_refused=True, considered=frozenset((A,)), considered_at=NOW - 5)  # fmt: skip
    assert not any(isinstance(each, RequestPlan) for each in act(before, Ticked(NOW))[1])
    _, commands = act(before, OrderGiven(NOW, order("replan")))
    assert any(isinstance(each, RequestPlan) for each in commands)


def test_rollback_is_settled_with_its_record() -> None:
    before = state(QUESTION, job=job(saving=KEPT), orders=(BACK,))
    after, commands = act(before, PlanFound(NOW, QUESTION.request, proposal()))
    assert restored(after) == Restore(Point(20, 3), "durable")
    (write,) = [each for each in commands if isinstance(each, WriteGeneration)]
    assert write.settles == "back"


# ---- one write after the other ------------------------------------------------------------------


LEAVES = replace(QUESTION, nodes=(B, C), reason="machine-a is draining")


@pytest.mark.parametrize(
    "events",
    [
        (
            Reported(NOW + 0.01, report(A, "broken", number=6, broken_peers=(B,))),
            ProbeFailed(NOW + 0.02, B),
            Ticked(NOW + 0.03),
        ),
        (Reported(NOW + 0.01, report(A, "failed", number=6)), Ticked(NOW + 5)),
        (OrderGiven(NOW + 0.01, order("cancel")),),
        (OrderGiven(NOW + 0.01, order("pause")),),
        (Reported(NOW + 0.01, report(A, "stopped", number=6)),
         Reported(NOW + 0.01, report(B, "stopped", number=6))),
    ],
    ids=["a machine dies", "a worker fails", "a cancel", "a pause", "all are parked"],
)  # fmt: skip
def test_no_other_record_is_written_while_a_stop_is_stored(events: tuple[Event, ...]) -> None:
    spare = node(C, report(C, "idle"))
    before = state(LEAVES, node(A, draining_since=NOW - 1), node(B), spare)
    after, commands = act(before, PlanFound(NOW, 4, proposal(B, C)))
    (stop,) = [each for each in commands if isinstance(each, WriteGeneration)]
    for event in events:
        after, commands = act(after, event)
        assert not any(isinstance(each, WriteGeneration) for each in commands)
    later = after.now + 0.1
    after, commands = act(after, GenerationWritten(later, stop.record))
    assert not any(isinstance(each, Resign) for each in commands)
    for each in commands:
        if isinstance(each, WriteGeneration):
            assert each.replaces == stop.record


def test_stop_deadline_starts_when_the_stop_is_stored() -> None:
    before = state(LEAVES, node(A, draining_since=NOW - 1), node(B), node(C, report(C, "idle")))
    stopping, commands = act(before, PlanFound(NOW, 4, proposal(B, C)))
    (stop,) = [each for each in commands if isinstance(each, WriteGeneration)]
    waited, _ = go_on(stopping, 600, every_s=1)
    told, commands = act(waited, GenerationWritten(NOW + 600, stop.record))
    assert not any(isinstance(each, WriteGeneration) for each in commands)
    stopping_now = phase(told)
    assert isinstance(stopping_now, Stopping)
    assert stopping_now.deadline > NOW + 650


def test_job_leaving_the_cluster_is_written_before_the_one_that_gets_it() -> None:
    first, second = job(id=JobId("z"), submitted_at=1.0), job(id=JobId("a"), state="queued")
    closing = replace(STOPPED, job=JobId("z"))
    before = state(Closing("paused", "lunch"), generation=closing, job=first)
    before = before.with_job(second)
    _, commands = act(before, GenerationWritten(NOW, replace(closing, state="closed")))
    written = [(each.job.id, each.job.state) for each in commands if isinstance(each, WriteJob)]
    assert written == [("z", "paused"), ("a", "running")]


def test_second_job_with_the_cluster_is_queued() -> None:
    two = (job(id=JobId("a")), job(id=JobId("b"), submitted_at=1.0))
    after, commands = act(
        State(), Elected(NOW, 9, nodes=(node(A).record,), jobs=two, generations=())
    )
    assert active_of(after).job == "a"
    assert after.jobs[JobId("b")].state == "queued"
    assert any(isinstance(each, WriteJob) and each.job.id == "b" for each in commands)


# ---- holders of snapshots -----------------------------------------------------------------------


def test_unused_nodes_report_before_a_start_from_step_0() -> None:
    records = (node(A).record, node(B).record, node(C).record)
    before, _ = act(
        State(), Elected(NOW, 9, nodes=records, jobs=(job(layers=2),), generations=(G,))
    )
    broken = replace(report(A, "broken", number=6, broken_peers=(B,)), sealed=pieces(40, 0))
    before, _ = act(before, Reported(NOW + 0.3, broken))
    before, _ = act(before, ProbeFailed(NOW + 0.5, B))
    before = planned(before, A, C)
    assert isinstance(phase(before), Planning), "c may hold all that b held"
    copies = replace(report(C, "idle", number=6), sealed=pieces(40, 0, 1))
    after, _ = act(before, Reported(before.now + 0.1, copies))
    assert restored(after) == Restore(Point(40, 3), "memory")


def test_unreachable_node_is_awaited_for_a_limited_time() -> None:
    records = (node(A).record, node(B).record)
    before, _ = act(State(), Elected(NOW, 9, nodes=records, jobs=(job(),), generations=(G,)))
    before, _ = act(before, Reported(NOW + 0.1, report(A, number=6)))
    before, commands = go_on(before, 2.0)
    assert ProbeAgent(B) in commands
    before, _ = act(before, ProbeFailed(before.now, B))
    failed = report(A, "failed", number=7, failure="NCCL")
    before, _ = act(before, Reported(before.now + 0.1, failed))
    before = planned(before, A)
    assert isinstance(phase(before), Planning), "it still has time to speak"
    after, _ = go_on(before, 20.0, every_s=1)
    assert restored(after) == Restore(Point(40, 3), "memory")


def test_probe_failure_older_than_a_report_is_ignored() -> None:
    before = state()
    before, commands = act(before, Reported(NOW, report(A, "broken", number=6, broken_peers=(B,))))
    assert ProbeAgent(B) in commands
    spoke = report(B, "broken", number=6, broken_peers=(A,))
    before, _ = act(before, Reported(NOW + 0.15, spoke))
    after, _ = act(before, ProbeFailed(NOW + 0.2, B))
    assert not after.nodes[B].is_lost


def test_snapshots_of_a_held_job_are_needed() -> None:
    held, other = replace(G, state="closed"), replace(G, job=JobId("z-old"), state="closed")
    jobs = {JOB: job(state="held"), other.job: job(id=other.job, state="done")}
    assert choose([held, other], jobs, A, None) == held
    paused = {JOB: job(state="paused"), other.job: job(id=other.job, state="done")}
    assert choose([held, other], paused, A, None) == held
    opened = replace(other, state="open")
    assert choose([held, opened], jobs, A, None) == opened
    assert choose([held, opened], jobs, A, JOB) == held


# ---- the rest -----------------------------------------------------------------------------------


def test_straggler_stays_if_it_is_the_only_node() -> None:
    names = (A, B, C, D)
    away = [node(x, absent_since=NOW - 1, heard_at=NOW - 0.2) for x in (B, C, D)]
    before = state(None, node(A), *away, generation=generation(*names), speeds=SEES_A_LIMP,
                   considered=frozenset(names))  # fmt: skip
    after, _ = act(before, Reported(NOW, report(A, step=41, number=6)))
    assert isinstance(phase(after), Running)
    assert [each.why for each in active_of(after).slowness.kept.values()] == [
        "no other node is usable"
    ]


def test_clock_that_was_ahead_does_not_break_intervals() -> None:
    ahead = job(saving=KEPT, past=JobPast(since=NOW + 8 * 3600))
    after, _ = act(state(FROM_NOTHING, job=ahead), PlanFound(NOW, 4, proposal()))
    assert isinstance(phase(after), Opening)


def test_failing_checkpoint_does_not_block_later_ones() -> None:
    votes = tuple(uploaded(A, step) for step in (40, 50))
    before = state(None, node(A, report(A, uploaded=votes)), node(B), job=job(saving=KEPT))
    before, commands = act(before, Ticked(NOW))
    assert [each.point.step for each in commands if isinstance(each, WriteManifest)] == [40]
    before, _ = act(before, CommitFailed(NOW + 1, JOB, Point(40, 3), "its header is damaged"))
    _, commands = go_on(before, 10, every_s=1)
    assert [each.point.step for each in commands if isinstance(each, WriteManifest)] == [50]


def test_new_leader_grants_a_start_its_full_time() -> None:
    slow = replace(G, wait_s=3000.0)
    after, _ = act(
        State(),
        Elected(NOW, 9, nodes=(node(A).record, node(B).record), jobs=(job(),), generations=(slow,)),
    )
    assert phase(after) == Starting(NOW, NOW + 1500, 0.0)


def test_refused_write_ends_the_term() -> None:
    after, commands = decide(state(LEAVES), WriteRefused(NOW))
    assert after.term is None
    assert any(isinstance(each, Resign) for each in commands)


def test_no_garbage_collection_while_a_rollback_is_ordered() -> None:
    """A rollback may go to a checkpoint older than those that retention keeps."""
    before = replace(state(job=job(saving=KEPT)), durables={JOB: durable(40)})
    _, commands = act(before, Ticked(NOW))
    assert any(isinstance(each, CollectGarbage) for each in commands)
    ordered = replace(before, active=grouped(active_of(before), orders=(BACK,), not_before=NOW + 9))
    _, commands = act(ordered, Ticked(NOW))
    assert not any(isinstance(each, CollectGarbage) for each in commands)
