"""Rules that no other test guards; each was found by a mutation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import JobId, JobPast, JobState, Point, Restore
from sailord.core.decide import decide
from sailord.core.model.commands import (
    CheckDurable,
    Note,
    RequestPlan,
    SettleOrder,
    WriteGeneration,
)
from sailord.core.model.events import (
    CommitFailed,
    Elected,
    GenerationWritten,
    JobSubmitted,
    OrderGiven,
    PlanFound,
    Reported,
    Ticked,
)
from sailord.core.model.phases import Closing, Held, Opening, Phase, Running, Stopping, Waiting
from sailord.core.model.proposal import Proposal
from sailord.core.model.standing import Present
from sailord.core.model.state import Check, Commit, Securing, State
from sailord.core.model.stragglers import NodeSpeeds, Straggler
from sailord.core.queries.report_reply import answer_to
from sailord.core.queries.restore_choice import in_memory, release_now, safe_point
from tests.sailord.core.states import (
    BEGAN,
    FROM_NOTHING,
    G4,
    JOB,
    KEPT,
    NOW,
    OPENING,
    QUESTION,
    STARTING,
    STOPPED,
    STOPPING,
    TERM,
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
    proposal,
    report,
    state,
)

CLOSED = replace(G, state="closed")
BACK = order("rollback", id_="back", durable=durable(20))
SEES_A_LIMP = NodeSpeeds(
    3, 10, NOW - 0.5, {"A100-40": 1.0}, {}, {A: Straggler(3.0, "others", NOW - 61, 10, 40)}
)
UNFORCED = replace(QUESTION, is_forced=False)


def orders_of(after: State) -> list[str]:
    return [each.id for each in active_of(after).orders]


# ---- orders -------------------------------------------------------------------------------------


def test_rollback_of_a_held_job_restores_the_named_checkpoint() -> None:
    held = state(Held("too many", BEGAN), job=job(state="held", saving=KEPT), generation=CLOSED)
    after, commands = act(held, OrderGiven(NOW, BACK))
    assert isinstance(phase(after), Waiting)
    assert orders_of(after) == ["back"]
    assert SettleOrder("back") not in commands


@pytest.mark.parametrize(("asked", "left"), [(20, []), (10, ["back"])])
def test_only_the_opened_rollback_is_settled(asked: int, left: list[str]) -> None:
    """Another may have been ordered while the record was on its way."""
    given = order("rollback", id_="back", durable=durable(asked))
    record = replace(G4, restore=Restore(Point(20, 3), "durable"))
    opening = Opening(record, proposal(), durable(20))
    before = state(opening, job=job(saving=KEPT), orders=(given,))
    after, _ = act(before, GenerationWritten(NOW, record))
    assert orders_of(after) == left


def test_record_settles_only_its_own_rollback() -> None:
    before = state(FROM_NOTHING, orders=(order("replan", id_="again"),))
    _, commands = act(before, PlanFound(NOW, FROM_NOTHING.request, proposal()))
    (write,) = [each for each in commands if isinstance(each, WriteGeneration)]
    assert write.settles == ""


def test_checkpoint_order_does_not_hide_a_resume() -> None:
    orders = (order("pause", id_="1"), order("resume", id_="2"), order("checkpoint", id_="3"))
    before = state(Closing("paused", "lunch"), generation=STOPPED, orders=orders)
    after, _ = act(before, GenerationWritten(NOW, replace(STOPPED, state="closed")))
    assert after.active is not None, "it has its turn again"


def test_stopped_job_is_not_done_before_its_last_step() -> None:
    nodes = [node(n, report(n, "stopped", step=40, sealed=(40,))) for n in (A, B)]
    for steps, becomes in ((40, Closing), (41, Running), (None, Running)):
        before = state(None, *nodes, job=job(steps=steps))
        assert isinstance(phase(act(before, Ticked(NOW))[0]), becomes)


def test_orders_given_while_a_generation_opens_are_kept() -> None:
    before = state(OPENING, orders=(order("replan", id_="again"),))
    assert SettleOrder("again") in act(before, GenerationWritten(NOW, G4))[1]


def test_replan_order_does_not_drop_an_open_question() -> None:
    """A plan that is not worth it is not adopted because of the order."""
    before = state(UNFORCED, orders=(order("replan"),))
    no = proposal(A, is_worth_it=False)
    after, _ = act(before, PlanFound(NOW, QUESTION.request, no))
    assert not isinstance(phase(after), Opening)


def test_stopping_generation_is_not_the_running_plan() -> None:
    before = state(QUESTION, generation=STOPPED)
    after, _ = act(before, PlanFound(NOW, QUESTION.request, proposal(plan=G.plan)))
    assert isinstance(phase(after), Stopping)


def test_adopted_stopping_generation_is_replanned() -> None:
    after, _ = act(state(generation=STOPPED), Ticked(NOW))
    assert isinstance(after_phase := phase(after), Planning)
    assert after_phase.reason == "the generation was told to stop"


def test_stall_time_starts_when_the_generation_runs() -> None:
    after, _ = act(state(STARTING, advanced_at=NOW - 99), Ticked(NOW))
    assert phase(after) == Running(NOW)
    assert active_of(after).progress.advanced_at == NOW


def test_stop_deadline_still_waits_for_snapshot_holders() -> None:
    unheard = replace(node(C, heard_at=0.0), report=None)
    late = replace(STOPPING, deadline=NOW - 1)
    for others, becomes in (((), Opening), ((unheard,), Stopping)):
        before = state(late, node(A), node(B), *others, generation=STOPPED)
        assert isinstance(phase(act(before, Ticked(NOW))[0]), becomes)


def test_stop_waits_for_its_own_record() -> None:
    """A late watch may still deliver the record from before the stop."""
    before = state(replace(STOPPING, deadline=NOW + 7))
    after, _ = act(before, GenerationWritten(NOW, G))
    assert phase(after) == phase(before)


def test_stop_ignores_records_of_other_generations() -> None:
    before = state(replace(STOPPING, deadline=NOW + 7))
    after, _ = act(before, GenerationWritten(NOW, replace(G, number=2, state="closed")))
    assert phase(after) == phase(before)
    assert active_of(after).generation == G


def test_measured_factors_go_with_a_straggler_question() -> None:
    seen = replace(SEES_A_LIMP, slow={}, factors={"A100-40": 1.3})
    _, commands = act(state(speeds=seen, considered_at=NOW - 1e6), Ticked(NOW))
    (question,) = [each for each in commands if isinstance(each, RequestPlan)]
    assert question.factors == {}


def test_plan_without_an_active_job_is_ignored() -> None:
    idle = replace(state(), active=None)
    after, commands = act(idle, PlanFound(NOW, 4, proposal()))
    assert (after.active, commands) == (None, ())


def test_second_job_with_the_cluster_waits_and_names_the_first() -> None:
    other = job(id=JobId("other"), submitted_at=5.0)
    taken = Elected(NOW, TERM + 1, jobs=(job(submitted_at=1.0), other), nodes=(), generations=())
    after, _ = act(state(), taken)
    assert after.jobs[other.id].state == "queued"
    assert after.jobs[other.id].reason == f"{JOB} has the cluster"


def test_departures_restart_when_a_job_gets_the_cluster() -> None:
    queued = job(state="queued", past=JobPast(departures=7))
    before = replace(state(), active=None, jobs={JOB: queued}, generations={JOB: CLOSED})
    after, _ = act(before, Ticked(NOW))
    assert (active_of(after).generation, after.generations) == (CLOSED, {})
    assert after.job.past.departures == 0


@pytest.mark.parametrize("told", [G4, replace(G4, job=JobId("other"))])
def test_record_without_an_active_job_is_ignored(told: object) -> None:
    idle = replace(state(), active=None)
    assert act(idle, GenerationWritten(NOW, told))[0].active is None  # type: ignore[arg-type] # a record


def test_only_the_pending_record_opens_a_generation() -> None:
    before = state(OPENING)
    after, _ = act(before, GenerationWritten(NOW, replace(G4, plan="another")))
    assert phase(after) == OPENING
    assert active_of(after).generation == G


def test_new_leader_keeps_a_job_held() -> None:
    held = job(state="held", reason="three attempts failed")
    taken = Elected(
        NOW, TERM + 1, nodes=(node(A).record, node(B).record), jobs=(held,), generations=(CLOSED,)
    )
    after, commands = act(state(), taken)
    assert phase(after) == Held("three attempts failed", NOW)
    after, more = act(after, Ticked(NOW + 60))
    assert isinstance(phase(after), Held)
    assert not [each for each in (*commands, *more) if isinstance(each, RequestPlan)]


def test_refused_question_is_not_repeated_at_once() -> None:
    after, _ = act(state(considered_at=NOW - 1e6), Ticked(NOW))
    assert isinstance(phase(after), Planning)
    assert active_of(after).asked.at == NOW


@pytest.mark.parametrize("then", ["cancelled", "done"])
def test_ended_job_is_not_resumed(then: JobState) -> None:
    before = state(Closing(then, "it is over"), generation=STOPPED, orders=(order("resume"),))
    after, _ = act(before, GenerationWritten(NOW, replace(STOPPED, state="closed")))
    assert after.jobs[JOB].state == then


@pytest.mark.parametrize("answer", [proposal(A, C, plan=G.plan), proposal(A, B, plan="new")])
def test_running_plan_means_same_plan_and_same_nodes(
    answer: Proposal,
) -> None:
    there = (node(n, heard_at=NOW) for n in (A, B, C))
    before = state(replace(QUESTION, nodes=(A, B, C)), *there)
    after, _ = act(before, PlanFound(NOW, QUESTION.request, answer))
    assert isinstance(phase(after), Stopping)


def test_imminent_departure_still_waits_for_snapshot_holders() -> None:
    """A new leader does not know the snapshots yet; a stop costs nothing then."""
    going = node(A, draining_since=NOW - 1)
    going = replace(going, record=replace(going.record, leaves_at=NOW + 0.1))
    unheard = node(C, heard_at=0.0)
    unheard = replace(unheard, report=None)
    answer = PlanFound(NOW, QUESTION.request, proposal(B))
    asked = replace(QUESTION, nodes=(B,))
    assert isinstance(phase(act(state(asked, going, node(B)), answer)[0]), Opening)
    assert isinstance(phase(act(state(asked, going, node(B), unheard), answer)[0]), Stopping)


@pytest.mark.parametrize(("again_s", "earlier"), [(None, 0.0), (20.0, 580.0), (1e6, 0.0)])
def test_ask_again_is_never_later_than_reconsider(again_s: float | None, earlier: float) -> None:
    no = proposal(A, is_worth_it=False, ask_again_s=again_s)
    before = state(UNFORCED, considered_at=NOW)
    assert before.options.reconsider_s == 600.0
    after, _ = act(before, PlanFound(NOW, QUESTION.request, no))
    assert active_of(after).asked.at == NOW - earlier


def test_refused_rollback_question_is_not_repeated_every_tick() -> None:
    waits = state(
        Waiting("a reason", NOW - 50),
        job=job(saving=KEPT),
        orders=(BACK,),
        is_refused=True,
        considered_at=NOW - 5,
    )
    assert not [each for each in act(waits, Ticked(NOW))[1] if isinstance(each, RequestPlan)]


@pytest.mark.parametrize("kind", ["pause", "resume", "cancel"])
def test_order_for_an_unknown_job_is_settled(kind: str) -> None:
    after, commands = act(state(), OrderGiven(NOW, order(kind, "ghost")))
    assert phase(after) == Running(BEGAN)
    assert commands == (SettleOrder("order"),)


def test_operators_reason_is_kept_with_the_job() -> None:
    after, _ = act(state(), OrderGiven(NOW, order("pause", reason="lunch")))
    stopping = phase(after)
    assert isinstance(stopping, Stopping)
    assert stopping.reason == "lunch"


def test_resume_checks_the_checkpoint_again() -> None:
    check = Check(durable(30), None, "a byte is wrong")
    held = state(Held("torn", BEGAN), job=job(state="held"), generation=CLOSED, check=check)
    after, _ = act(held, OrderGiven(NOW, order("resume")))
    assert active_of(after).checkpointing.check is None


def test_healthy_generation_clears_failures() -> None:
    before = state(step=29, failures=2, failed_at=10)
    ill, _ = act(before, Ticked(NOW))
    healthy, _ = act(before, Reported(NOW, report(A, step=30, number=6)))
    assert (active_of(ill).attempts.failures, active_of(healthy).attempts.failures) == (2, 0)


# ---- storage ------------------------------------------------------------------------------------


def test_failed_commit_of_another_job_is_ignored() -> None:
    before = state(commit=Commit(Point(39, 3)), job=job(saving=KEPT))
    after, _ = act(before, CommitFailed(NOW, JobId("other"), Point(39, 3), "the disk is full"))
    assert active_of(after).checkpointing.commit == Commit(Point(39, 3))
    assert active_of(after).checkpointing.trouble == ""


def test_late_failure_does_not_end_the_next_commit() -> None:
    before = state(commit=Commit(Point(40, 3)), job=job(saving=KEPT))
    after, _ = act(before, CommitFailed(NOW, JOB, Point(39, 3), "the disk was full"))
    assert active_of(after).checkpointing.commit == Commit(Point(40, 3))


def test_no_release_while_a_generation_opens() -> None:
    assert release_now(state(OPENING)) is None


def test_secured_point_is_not_released() -> None:
    assert release_now(state()) == Point(40, 3)
    assert release_now(state(securing=Securing(Point(39, 3), NOW + 9))) == Point(39, 3)


def test_agents_are_told_which_point_to_upload() -> None:
    point = Point(40, 3)
    asked = state(securing=Securing(point, NOW + 9))
    assert answer_to(asked, report(A), None).upload == point
    assert answer_to(state(), report(A), None).upload is None


def test_ordered_checkpoint_takes_the_newest_step_once() -> None:
    before = state(job=job(saving=KEPT))
    after, _ = act(before, OrderGiven(NOW, order("checkpoint", id_="now")))
    assert active_of(after).checkpointing.securing is not None
    assert active_of(after).checkpointing.securing.point == Point(40, 3)
    done, commands = act(replace(after, durables={JOB: durable(40)}), Ticked(NOW + 1))
    assert active_of(done).checkpointing.securing is None
    assert SettleOrder("now") in commands


def test_ordered_checkpoint_waits_for_a_complete_step() -> None:
    bare = (node(n, report(n, sealed=())) for n in (A, B))
    before = state(None, *bare, job=job(saving=KEPT), orders=(order("checkpoint", id_="now"),))
    after, commands = act(before, Ticked(NOW))
    assert (active_of(after).checkpointing.securing, commands) == (None, ())
    assert orders_of(after) == ["now"]


def test_ordered_checkpoint_without_a_uri_is_refused() -> None:
    before = state(job=job())
    commands = decide(before, OrderGiven(NOW, order("checkpoint", id_="now")))[1]
    said = [each.text for each in commands if isinstance(each, Note)]
    assert said == ["no checkpoint: the job names no place for them"]
    assert SettleOrder("now") in commands


@pytest.mark.parametrize(
    ("began", "is_thorough"),
    [
        ((Restore(Point(30, 3), "durable"), 30), True),
        ((Restore(Point(30, 3), "durable"), 31), False),
        ((Restore(Point(30, 2), "memory"), 30), False),
    ],
    ids=["came to nothing", "did a step", "began elsewhere"],
)
def test_checkpoint_that_led_to_no_step_is_read_completely(
    began: tuple[Restore, int], is_thorough: bool
) -> None:
    restore, step = began
    nodes = (node(n, report(n, "idle", step=step, sealed=())) for n in (A, B))
    before = state(
        FROM_NOTHING,
        *nodes,
        job=job(saving=KEPT),
        generation=replace(G, restore=restore),
        step=step,
    )
    before = replace(before, durables={JOB: durable(30)})
    _, commands = act(before, PlanFound(NOW, FROM_NOTHING.request, proposal()))
    assert commands == (CheckDurable(job(saving=KEPT), durable(30), is_thorough),)


def test_storage_events_without_an_active_job_are_ignored() -> None:
    idle = replace(state(), active=None)
    event = CommitFailed(NOW, JOB, Point(39, 3), "the disk was full")
    assert act(idle, event)[0].active is None


def test_lost_node_is_no_failure_domain() -> None:
    """On the only node, one copy is enough."""
    alone = node(A, report(A, sealed=(40,)))
    lost = node(B, report(B, sealed=()), lost_at=NOW - 1, why_lost="gone")
    assert release_now(state(None, alone, node(B, report(B, sealed=())))) is None
    assert release_now(state(None, alone, lost)) == Point(40, 3)
    assert safe_point(state(None, alone, lost), Point(40, 3)) is None, "its loss takes all"
    kept = replace(state(None, alone, lost), durables={JOB: durable(30)})
    assert safe_point(kept, Point(40, 3)) == Point(30, 3)
    assert safe_point(state(None, alone, node(B)), Point(39, 3)) == Point(39, 3)


@pytest.mark.parametrize(("kept", "becomes"), [(20, Stopping), (40, Closing)])
def test_pause_secures_the_step_it_stopped_at(kept: int, becomes: type[Phase]) -> None:
    nodes = (node(n, report(n, "stopped", sealed=(40,))) for n in (A, B))
    pausing = Stopping("paused", "lunch", NOW + 20)
    before = state(pausing, *nodes, generation=STOPPED, job=job(saving=KEPT))
    after, _ = act(replace(before, durables={JOB: durable(kept)}), Ticked(NOW))
    assert isinstance(phase(after), becomes)


def test_new_generation_clears_commit_securing_and_check() -> None:
    errands = {
        "commit": Commit(Point(39, 3)),
        "securing": Securing(Point(39, 3), NOW + 9),
        "check": Check(durable(20)),
    }
    record = replace(G4, number=4)
    before = state(Opening(record, proposal()), step=55, **errands)
    after, _ = act(before, GenerationWritten(NOW, record))
    assert (active_of(after).progress.step, after.durables) == (40, before.durables)
    assert [getattr(active_of(after).checkpointing, name) for name in errands] == [None, None, None]


def test_reporting_node_without_a_lease_still_holds_snapshots() -> None:
    """A firewall may block its agent from the store alone."""
    away = node(B, absent_since=NOW - 3, heard_at=NOW - 1)
    silent = replace(away, heard_at=NOW - 5)
    for b, is_there in ((away, True), (silent, False)):
        now = state(None, node(A), b)
        assert (B in {id_ for id_, _ in in_memory(now, active_of(now).job)}) is is_there


def test_older_checkpoint_that_a_generation_opens_from_becomes_the_newest() -> None:
    record = replace(G4, restore=Restore(Point(20, 3), "durable"))
    before = replace(state(Opening(record, proposal(), durable(20))), durables={JOB: durable(30)})
    after, _ = act(before, GenerationWritten(NOW, record))
    assert after.durables == {JOB: durable(20)}


def test_submitted_checkpoint_is_restored() -> None:
    other = job(id=JobId("other"), state="queued")
    after, _ = act(state(), JobSubmitted(NOW, other, durable(70)))
    assert after.durables == {other.id: durable(70)}


def test_absent_member_still_counts_as_a_failure_domain() -> None:
    a = node(A, report(A, sealed=(40, 41)))
    b = node(B, report(B, sealed=(40,)), absent_since=NOW - 1, heard_at=NOW - 0.5)
    assert release_now(state(None, a, b)) == Point(40, 3)


def test_absent_unused_node_is_no_failure_domain() -> None:
    alone = replace(G, members=(A,))
    a = node(A, report(A, sealed=(40,)))
    away = node(B, report(B, "idle", sealed=()), absent_since=NOW - 1)
    assert release_now(state(None, a, away, generation=alone)) == Point(40, 3)
    there = replace(away, standing=Present())
    assert release_now(state(None, a, there, generation=alone)) is None
