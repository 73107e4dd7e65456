"""Jobs that are held: those that no node can be prepared for, and who gets the cluster then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from agents.protocol.records import PREPARING, JobId, JobRecord, Report
from sailord.api.answers.queue_place import place_text, waits_for
from sailord.core.decide import decide
from sailord.core.model.commands import Note, WriteJob
from sailord.core.model.events import (
    Elected,
    JobSubmitted,
    NodesObserved,
    OrderGiven,
    PlanRefused,
    Ticked,
)
from sailord.core.model.nodes import Node, Nodes
from sailord.core.model.options import Options
from sailord.core.model.phases import Closing, Held, Running, Waiting
from sailord.core.model.state import State
from sailord.core.queries.job_queue import in_queue
from sailord.core.queries.restore_choice import why_queue_stands
from tests.sailord.core.states import (
    BEGAN,
    FROM_NOTHING,
    JOB,
    NOW,
    A,
    B,
    C,
    G,
    Planning,
    act,
    active_of,
    durable,
    job,
    node,
    order,
    phase,
    record,
    report,
    state,
)

NEXT = JobRecord(JobId("next"), "queued", submitted_at=NOW)
CLOSED = replace(G, state="closed")
WHY = "setup `make` exited with 2: no make"
LIMIT_S = Options().unprepared_s


# ---- no node can be prepared --------------------------------------------------------------------


def idle(id_, unfit: str = "", **others: object) -> Node:
    return node(id_, report(id_, "idle", sealed=(), unfit=unfit), since=BEGAN, **others)


def waits(*nodes: Node, since: float = NOW) -> State:
    """A job whose turn came then."""
    waiting = state(Waiting("next in the queue", since), *nodes)
    return replace(waiting, active=replace(active_of(waiting), generation=None))


def test_a_job_that_no_node_can_be_prepared_for_is_held_after_a_second_attempt() -> None:
    before = waits(idle(A, WHY), idle(B, WHY), idle(C, "secrets are missing: HF_TOKEN"))
    early, _ = act(before, Ticked(NOW + LIMIT_S - 0.1))
    assert phase(early) == Waiting("next in the queue", NOW)
    after, commands = act(before, Ticked(NOW + LIMIT_S))
    why = (
        f"no node can be prepared for it: machine-a, machine-b: {WHY}; "
        "machine-c: secrets are missing: HF_TOKEN"
    )
    assert phase(after) == Held(why, NOW + LIMIT_S)
    held_at = replace(job().past, held_at=NOW + LIMIT_S)
    assert commands[0] == WriteJob(job(state="held", reason=why, past=held_at))


@pytest.mark.parametrize(
    "other",
    [
        idle(C),
        idle(C, PREPARING),
        Node(record(C), BEGAN),
        replace(idle(C), record=record(C, state="joining")),
    ],
    ids=["usable", "being prepared", "has not reported", "tests its devices"],
)
def test_a_job_waits_while_one_node_may_still_run_it(other: Node) -> None:
    after, _ = act(waits(idle(A, WHY), other), Ticked(NOW + 9 * LIMIT_S))
    assert not isinstance(phase(after), Held)


@pytest.mark.parametrize(
    "other",
    [
        idle(C, draining_since=BEGAN),
        idle(C, is_cordoned=True),
        idle(C, slow="it crawls"),
        idle(C, lost_at=BEGAN),
        node(C, report(C, "idle", fault="its device fell off the bus"), since=BEGAN),
    ],
    ids=["draining", "cordoned", "a straggler", "lost", "broken"],
)
def test_a_node_that_comes_back_only_by_an_order_delays_no_hold(other: Node) -> None:
    after, _ = act(waits(idle(A, WHY), other), Ticked(NOW + LIMIT_S))
    assert isinstance(phase(after), Held)


def test_each_node_has_the_time_for_two_attempts() -> None:
    late = replace(idle(B, WHY), since=NOW + 50)
    before = waits(idle(A, WHY), late)
    assert isinstance(phase(act(before, Ticked(NOW + LIMIT_S))[0]), Waiting)
    assert isinstance(phase(act(before, Ticked(NOW + 50 + LIMIT_S))[0]), Held)


def test_without_any_node_a_job_is_not_held() -> None:
    for nodes in ((idle(A, lost_at=BEGAN),), (idle(A, is_cordoned=True),)):
        after, _ = act(waits(*nodes), Ticked(NOW + 9 * LIMIT_S))
        assert isinstance(phase(after), Waiting)


# ---- a held job and the queue -------------------------------------------------------------------


def held(*nodes: Node, **others: object) -> State:
    """A job that is held since a generation failed, and what its nodes hold."""
    return state(
        Held("3 attempts failed", NOW - 9), *nodes, job=job(state="held"), generation=CLOSED,
        **others,
    )  # fmt: skip


def said(id_, *sealed: int, **others: object) -> Report:
    return report(id_, "idle", sealed=sealed, **others)


NOTHING_SEALED = (node(A, said(A)), node(B, said(B)))
YIELDED = "next has the cluster; held: 3 attempts failed"


def test_a_held_job_yields_to_the_next_one_if_no_step_is_lost() -> None:
    before = held(*NOTHING_SEALED)
    after, commands = act(before, JobSubmitted(NOW, NEXT))
    assert active_of(after).job == NEXT.id
    assert after.jobs[JOB] == job(state="paused", reason=YIELDED)
    assert after.generations[JOB] == CLOSED, "it continues from there"
    written = [each.job for each in commands if isinstance(each, WriteJob)]
    assert [(each.id, each.state) for each in written] == [(JOB, "paused"), (NEXT.id, "running")]


def test_a_held_job_keeps_the_cluster_while_the_queue_is_empty() -> None:
    before = held(*NOTHING_SEALED)
    after, commands = act(before, Ticked(NOW + 9999))
    assert (phase(after), after.jobs, commands) == (phase(before), before.jobs, ())


def test_a_held_job_keeps_the_cluster_while_steps_are_in_memory_alone() -> None:
    before = held(node(A, said(A, 39, 40)), node(B, said(B)))
    kept = replace(before, durables={JOB: durable(38)})
    for known, steps in (
        (before, "steps 1 to 40 are"),
        (kept, "steps 39 to 40 are"),
        (replace(before, durables={JOB: durable(39)}), "step 40 is"),
    ):
        after, _ = act(known, JobSubmitted(NOW, NEXT))
        assert isinstance(phase(after), Held)
        assert active_of(after).job == JOB
        told = why_queue_stands(after)
        assert told.startswith("job is held: 3 attempts failed. It keeps the cluster since ")
        assert f"since {steps} only in its nodes' memory" in told


def test_a_held_job_yields_once_its_last_step_is_durable_or_lost() -> None:
    waits_behind = held(node(A, said(A, 40)), node(B, said(B))).with_job(NEXT)
    is_durable = replace(waits_behind, durables={JOB: durable(40)})
    assert active_of(act(is_durable, Ticked(NOW))[0]).job == NEXT.id
    is_lost = held(node(A, said(A, 40), lost_at=NOW), node(B, said(B))).with_job(NEXT)
    assert active_of(act(is_lost, Ticked(NOW))[0]).job == NEXT.id


def test_a_held_job_yields_only_after_its_workers_have_ended() -> None:
    computes = held(node(A, report(A, sealed=())), node(B, said(B))).with_job(NEXT)
    assert active_of(act(computes, Ticked(NOW))[0]).job == JOB, "it may do a step yet"
    is_dead = held(node(A, report(A, sealed=()), lost_at=NOW), node(B, said(B))).with_job(NEXT)
    assert active_of(act(is_dead, Ticked(NOW))[0]).job == NEXT.id


def test_a_held_job_yields_only_after_every_possible_holder_has_reported() -> None:
    unheard = held(Node(record(A), NOW - 1), node(B, said(B))).with_job(NEXT)
    after, _ = act(unheard, Ticked(NOW))
    assert active_of(after).job == JOB
    told = why_queue_stands(after)
    assert "once all nodes have reported their snapshots, and its workers have ended" in told
    away = held(node(A, said(A), absent_since=NOW - 0.1), node(B, said(B))).with_job(NEXT)
    assert active_of(act(away, Ticked(NOW))[0]).job == JOB, "it may come back with its memory"


def test_a_job_is_stored_as_held_before_it_yields() -> None:
    closing = state(Closing("held", "it fails"), *NOTHING_SEALED, generation=CLOSED).with_job(NEXT)
    after, commands = act(closing, Ticked(NOW))
    (written,) = (each.job for each in commands if isinstance(each, WriteJob))
    assert (written.state, written.reason, written.past.held_at) == ("held", "it fails", NOW)
    assert active_of(act(after, Ticked(NOW + 0.1))[0]).job == NEXT.id


def test_a_new_leader_knows_since_when_a_job_is_held() -> None:
    """The time after which it gives its instances back does not begin anew."""
    since = NOW - 1000
    for held_at, expected in ((since, since), (None, NOW), (NOW + 9, NOW)):
        known = job(state="held", reason="it fails", past=replace(job().past, held_at=held_at))
        after, _ = act(State(), Elected(NOW, 9, nodes=(), jobs=(known,), generations=()))
        assert phase(after) == Held("it fails", expected)


def test_an_order_to_resume_goes_before_the_next_job() -> None:
    before = held(*NOTHING_SEALED, orders=(order("resume"),)).with_job(NEXT)
    after, _ = act(before, Ticked(NOW))
    assert (active_of(after).job, active_of(after).phase) == (
        JOB,
        Waiting("resume was ordered", NOW),
    )


def test_jobs_behind_one_that_no_node_is_ready_for_show_why_they_wait() -> None:
    told = why_queue_stands(waits(idle(A, WHY), idle(B, WHY)))
    assert told == f"job has the cluster, and no node is ready: machine-a, machine-b: {WHY}"
    assert why_queue_stands(waits(idle(A, WHY), idle(B))) == ""


def test_no_reason_is_shown_while_a_job_runs_or_closes() -> None:
    for running in (state(Running(BEGAN)), state(Closing("held", "it fails"))):
        assert why_queue_stands(running) == ""
    assert why_queue_stands(replace(state(), active=None)) == ""


# ---- a job whose limits pay for no plan ---------------------------------------------------------

DEAR = "objective.max_usd_total: is 5, and the cheapest plan there is needs 90; raise it to 90"


def unpaid(**others: object) -> State:
    """A job whose turn has come, and for which the planner has just found its limits too low."""
    question = Planning(4, (A, B), "its turn", True, NOW + 60, before=Waiting("its turn", NOW))
    before = state(question, *NOTHING_SEALED, **{"generation": CLOSED, **others})
    return act(before, PlanRefused(NOW, 4, DEAR, is_unpaid=True))[0]


def test_a_job_whose_limits_pay_for_no_plan_lets_the_next_one_go_first() -> None:
    after, commands = act(unpaid(), JobSubmitted(NOW, NEXT))
    assert active_of(after).job == NEXT.id
    assert after.jobs[JOB] == job(state="queued", reason=f"no plan: {DEAR}")
    written = [each.job for each in commands if isinstance(each, WriteJob)]
    assert [(each.id, each.state) for each in written] == [(JOB, "queued"), (NEXT.id, "running")]
    _, said = decide(unpaid(), JobSubmitted(NOW, NEXT))
    told = [each.text for each in said if isinstance(each, Note) and each.is_transition]
    assert told == [f"queued: no plan: {DEAR}", "running: next in the queue"]
    assert waits_for(after, JOB) == (NEXT.id,)
    assert "sailorctl budget job USD" in place_text(after, JOB)
    third = replace(NEXT, id=JobId("third"), submitted_at=NOW + 1)
    behind, _ = act(after, JobSubmitted(NOW, third))
    assert waits_for(behind, third.id) == (NEXT.id,), "it does not wait for the unpaid one"


def goes_next(known: State) -> JobId:
    """The job that gets the cluster once the active one is cancelled."""
    third = replace(NEXT, id=JobId("third"), submitted_at=NOW + 1)
    known, _ = act(known, JobSubmitted(NOW, third))
    known, _ = act(known, OrderGiven(NOW, order("cancel", NEXT.id, "end")))
    return active_of(known).job


def test_an_unpaid_job_returns_to_its_place_with_an_order_or_a_new_node() -> None:
    aside, _ = act(unpaid(), JobSubmitted(NOW, NEXT))
    assert goes_next(aside) == "third", "nothing has changed for it"
    raised, _ = act(aside, OrderGiven(NOW, order("budget", usd_max=100.0)))
    assert goes_next(raised) == JOB
    seen, _ = act(aside, NodesObserved(NOW, (record(A), record(B))))
    assert goes_next(seen) == "third"
    joined, _ = act(aside, NodesObserved(NOW, (record(A), record(B), record(C))))
    assert goes_next(joined) == JOB, "the new node may be cheaper"
    later = replace(aside, now=NOW + Options.reconsider_s)
    assert goes_next(later) == JOB, "prices may have changed"


def test_an_unpaid_job_is_said_to_be_behind_those_that_go_first() -> None:
    aside, _ = act(unpaid(), JobSubmitted(NOW, NEXT))
    third = replace(NEXT, id=JobId("third"), submitted_at=NOW + 1)
    behind, _ = act(aside, JobSubmitted(NOW, third))
    assert [each.id for each in in_queue(behind)] == ["third", JOB]
    assert waits_for(behind, JOB) == (NEXT.id, "third")
    hourly = replace(behind.jobs[JOB], reason="no plan: objective.max_usd_per_hour: is 5")
    assert "no order raises it" in place_text(replace(behind, jobs={JOB: hourly}), JOB)
    held = replace(aside, active=replace(active_of(aside), phase=Held("3 attempts", NOW - 9)))
    kept, _ = act(held, Ticked(NOW + 1))
    assert active_of(kept).job == NEXT.id, "a held job does not yield to one without a plan"


def test_unpaid_jobs_do_not_give_each_other_the_cluster_in_turn() -> None:
    known, _ = act(unpaid(), JobSubmitted(NOW, NEXT))
    asked = next(known for known in _ticked(known) if active_of(known).question is not None)
    question = active_of(asked).question
    assert question is not None
    refusal = PlanRefused(asked.now, question.request, DEAR, is_unpaid=True)
    refused, _ = act(asked, refusal)
    assert active_of(refused).job == NEXT.id
    assert isinstance(phase(refused), Waiting)


def test_unpaid_jobs_alternate_only_as_often_as_they_are_asked_about() -> None:
    """Different nodes are unfit for each, so each was asked about others."""
    known, _ = act(replace(unpaid(), nodes=for_job(JOB)), JobSubmitted(NOW, NEXT))
    turns = [active_of(known).job]
    while known.now < NOW + Options.reconsider_s:
        last = turns[-1]
        known, _ = act(replace(known, nodes=for_job(last)), Ticked(known.now + 1))
        question = active_of(known).question
        if question is not None:
            refused = PlanRefused(known.now, question.request, DEAR, is_unpaid=True)
            known, _ = act(known, refused)
        turns += [active_of(known).job] if active_of(known).job != last else []
    assert turns in ([NEXT.id], [NEXT.id, JOB])


def for_job(id_: JobId) -> Nodes:
    """Three nodes, of which one cannot be prepared for this job."""
    unfit = {JOB: C, NEXT.id: B}[id_]
    return Nodes({each: idle(each, "no room" if each == unfit else "") for each in (A, B, C)})


def _ticked(known: State) -> Iterator[State]:
    for _ in range(100):
        known, _ = act(known, Ticked(known.now + 1))
        yield known


@pytest.mark.parametrize(
    "kept",
    [
        replace(unpaid(), options=Options(reserve_s=60.0)),
        replace(unpaid(), options=Options(share=True)),
        unpaid(generation=G),
        replace(unpaid(), nodes=Nodes({A: node(A, said(A, 40)), B: node(B, said(B, 40))})),
        replace(unpaid(), nodes=Nodes({**unpaid().nodes, C: idle(C)})),
        replace(unpaid(), active=replace(active_of(unpaid()), may_start_over=True)),
        act(state(FROM_NOTHING, generation=CLOSED), PlanRefused(NOW, 4, "it does not fit"))[0],
    ],
    ids=[
        "cheaper instances may be rented",
        "jobs share",
        "it trained in this turn",
        "its last steps are in memory alone",
        "a new node is asked about first",
        "an operator lets it start over",
        "more nodes would help",
    ],
)
def test_a_job_without_a_plan_keeps_its_turn_in_other_cases(kept: State) -> None:
    after, _ = act(kept, JobSubmitted(NOW, NEXT))
    assert active_of(after).job == JOB
