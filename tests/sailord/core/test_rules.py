"""Single rules that nothing else would miss: each was found by breaking it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import JobId, JobState, Past, Point, Restore
from sailord.core.commands import CheckDurable, Note, RequestPlan, SettleIntent, WriteGeneration
from sailord.core.decide import decide
from sailord.core.events import (
    CommitFailed,
    Elected,
    GenerationWritten,
    IntentGiven,
    JobSubmitted,
    PlanFound,
    Ticked,
)
from sailord.core.phases import Closing, Held, Opening, Phase, Running, Stopping, Waiting
from sailord.core.proposal import Proposal
from sailord.core.report_reply import answer_to
from sailord.core.restore_choice import in_memory, release_now
from sailord.core.standing import Present
from sailord.core.state import Check, Commit, Securing, State
from sailord.core.straggler_detection import Speeds, Straggler
from tests.sailord.core.standing import (
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
SEES_A_LIMP = Speeds(
    3, 10, NOW - 0.5, {"A100-40": 1.0}, {}, {A: Straggler(3.0, "others", NOW - 61, 10, 40)}
)
UNFORCED = replace(QUESTION, is_forced=False)


def orders_of(after: State) -> list[str]:
    assert after.active is not None
    return [each.id for each in after.active.orders]


# ---- orders -------------------------------------------------------------------------------------


def test_a_held_job_goes_back_as_ordered_and_is_not_merely_resumed() -> None:
    held = state(Held("too many", BEGAN), job=job(state="held", saving=KEPT), generation=CLOSED)
    after, commands = act(held, IntentGiven(NOW, BACK))
    assert isinstance(phase(after), Waiting)
    assert orders_of(after) == ["back"]
    assert SettleIntent("back") not in commands


@pytest.mark.parametrize(("asked", "left"), [(20, []), (10, ["back"])])
def test_only_the_way_back_that_was_opened_is_done(asked: int, left: list[str]) -> None:
    """Another may have been ordered while the record was on its way."""
    given = order("rollback", id_="back", durable=durable(asked))
    record = replace(G4, restore=Restore(Point(20, 3), "durable"))
    opening = Opening(record, proposal(), durable(20))
    before = state(opening, job=job(saving=KEPT), orders=(given,))
    after, _ = act(before, GenerationWritten(NOW, record))
    assert orders_of(after) == left


def test_a_record_settles_the_rollback_that_it_carries_out_and_no_other_order() -> None:
    before = state(FROM_NOTHING, orders=(order("replan", id_="again"),))
    _, commands = act(before, PlanFound(NOW, FROM_NOTHING.request, proposal()))
    (write,) = [each for each in commands if isinstance(each, WriteGeneration)]
    assert write.settles == ""


def test_a_checkpoint_that_was_ordered_does_not_hide_that_the_job_is_resumed() -> None:
    orders = (order("pause", id_="1"), order("resume", id_="2"), order("checkpoint", id_="3"))
    before = state(Closing("paused", "lunch"), generation=STOPPED, orders=orders)
    after, _ = act(before, GenerationWritten(NOW, replace(STOPPED, state="closed")))
    assert after.active is not None, "it has its turn again"


def test_a_job_of_which_all_have_stopped_is_not_done_before_its_last_step() -> None:
    nodes = [node(n, report(n, "stopped", step=40, sealed=(40,))) for n in (A, B)]
    for steps, becomes in ((40, Closing), (41, Running), (None, Running)):
        before = state(None, *nodes, job=job(steps=steps))
        assert isinstance(phase(act(before, Ticked(NOW))[0]), becomes)


def test_what_else_was_ordered_while_a_generation_opened_is_still_to_be_done() -> None:
    before = state(OPENING, orders=(order("replan", id_="again"),))
    assert SettleIntent("again") in act(before, GenerationWritten(NOW, G4))[1]


def test_a_replan_that_is_ordered_while_it_is_planned_throws_nothing_away() -> None:
    """Of all orders a rollback alone leaves what runs as it is."""
    before = state(UNFORCED, orders=(order("replan"),))
    no = proposal(A, is_worth_it=False)
    after, _ = act(before, PlanFound(NOW, QUESTION.request, no))
    assert not isinstance(phase(after), Opening)


def test_a_plan_that_was_told_to_stop_is_not_what_runs() -> None:
    before = state(QUESTION, generation=STOPPED)
    after, _ = act(before, PlanFound(NOW, QUESTION.request, proposal(plan=G.plan)))
    assert isinstance(phase(after), Stopping)


def test_a_generation_that_was_told_to_stop_before_we_led_is_followed_by_another() -> None:
    after, _ = act(state(generation=STOPPED), Ticked(NOW))
    assert isinstance(after_phase := phase(after), Planning)
    assert after_phase.reason == "the generation was told to stop"


def test_a_generation_that_begins_to_run_has_its_time_for_a_step_from_then_on() -> None:
    after, _ = act(state(STARTING, advanced_at=NOW - 99), Ticked(NOW))
    assert phase(after) == Running(NOW)
    assert after.active is not None
    assert after.active.progress.advanced_at == NOW


def test_who_does_not_stop_in_time_is_left_only_once_all_were_heard() -> None:
    unheard = replace(node(C, heard_at=0.0), report=None)
    late = replace(STOPPING, deadline=NOW - 1)
    for others, becomes in (((), Opening), ((unheard,), Stopping)):
        before = state(late, node(A), node(B), *others, generation=STOPPED)
        assert isinstance(phase(act(before, Ticked(NOW))[0]), becomes)


def test_the_record_as_it_was_does_not_say_that_all_were_told_to_stop() -> None:
    """What a watch tells late is a record that was written before the one that stops."""
    before = state(replace(STOPPING, deadline=NOW + 7))
    after, _ = act(before, GenerationWritten(NOW, G))
    assert phase(after) == phase(before)


def test_the_end_of_another_generation_does_not_say_that_all_were_told_to_stop() -> None:
    before = state(replace(STOPPING, deadline=NOW + 7))
    after, _ = act(before, GenerationWritten(NOW, replace(G, number=2, state="closed")))
    assert phase(after) == phase(before)
    assert after.active is not None
    assert after.active.generation == G


def test_what_kinds_of_gpu_were_seen_to_take_matters_where_a_node_is_slow() -> None:
    seen = replace(SEES_A_LIMP, slow={}, factors={"A100-40": 1.3})
    _, commands = act(state(watch=seen, considered_at=NOW - 1e6), Ticked(NOW))
    (question,) = [each for each in commands if isinstance(each, RequestPlan)]
    assert question.factors == {}


def test_an_answer_that_comes_when_no_job_is_there_is_forgotten() -> None:
    nobody = replace(state(), active=None)
    after, commands = act(nobody, PlanFound(NOW, 4, proposal()))
    assert (after.active, commands) == (None, ())


def test_of_two_that_have_the_cluster_one_waits_and_says_for_whom() -> None:
    other = job(id=JobId("other"), submitted_at=5.0)
    taken = Elected(NOW, TERM + 1, jobs=(job(submitted_at=1.0), other), nodes=(), generations=())
    after, _ = act(state(), taken)
    assert after.jobs[other.id].state == "queued"
    assert after.jobs[other.id].reason == f"{JOB} has the cluster"


def test_who_gets_the_cluster_again_has_lost_nobody_yet() -> None:
    queued = job(state="queued", past=Past(departures=7))
    before = replace(state(), active=None, jobs={JOB: queued}, generations={JOB: CLOSED})
    after, _ = act(before, Ticked(NOW))
    assert after.active is not None
    assert (after.active.generation, after.generations) == (CLOSED, {})
    assert after.job.past.departures == 0


@pytest.mark.parametrize("told", [G4, replace(G4, job=JobId("other"))])
def test_a_record_that_is_written_when_no_job_is_there_is_forgotten(told: object) -> None:
    nobody = replace(state(), active=None)
    assert act(nobody, GenerationWritten(NOW, told))[0].active is None  # type: ignore[arg-type] # a record


def test_only_the_record_that_is_on_its_way_opens_a_generation() -> None:
    before = state(OPENING)
    after, _ = act(before, GenerationWritten(NOW, replace(G4, plan="another")))
    assert phase(after) == OPENING
    assert after.active is not None
    assert after.active.generation == G


def test_a_new_leader_leaves_a_held_job_alone() -> None:
    held = job(state="held", reason="five attempts failed")
    taken = Elected(NOW, TERM + 1, (node(A).record, node(B).record), (held,), (CLOSED,))
    after, commands = act(state(), taken)
    assert phase(after) == Held("five attempts failed", NOW)
    after, more = act(after, Ticked(NOW + 60))
    assert isinstance(phase(after), Held)
    assert not [each for each in (*commands, *more) if isinstance(each, RequestPlan)]


def test_what_was_asked_just_now_is_not_asked_again_for_a_while() -> None:
    after, _ = act(state(considered_at=NOW - 1e6), Ticked(NOW))
    assert isinstance(phase(after), Planning)
    assert after.active is not None
    assert after.active.asked.at == NOW


@pytest.mark.parametrize("then", ["cancelled", "done"])
def test_who_has_ended_is_not_resumed(then: JobState) -> None:
    before = state(Closing(then, "it is over"), generation=STOPPED, orders=(order("resume"),))
    after, _ = act(before, GenerationWritten(NOW, replace(STOPPED, state="closed")))
    assert after.jobs[JOB].state == then


@pytest.mark.parametrize("answer", [proposal(A, C, plan=G.plan), proposal(A, B, plan="new")])
def test_the_same_plan_on_other_nodes_is_another_one_and_so_is_the_contrary(
    answer: Proposal,
) -> None:
    there = (node(n, heard_at=NOW) for n in (A, B, C))
    before = state(replace(QUESTION, asked_for=(A, B, C)), *there)
    after, _ = act(before, PlanFound(NOW, QUESTION.request, answer))
    assert isinstance(phase(after), Stopping)


def test_who_goes_at_once_is_not_stopped_for_before_all_were_heard() -> None:
    """A new leader does not know yet what stands where; a stop costs nothing then."""
    going = node(A, draining_since=NOW - 1)
    going = replace(going, record=replace(going.record, leaves_at=NOW + 0.1))
    unheard = node(C, heard_at=0.0)
    unheard = replace(unheard, report=None)
    answer = PlanFound(NOW, QUESTION.request, proposal(B))
    asked = replace(QUESTION, asked_for=(B,))
    assert isinstance(phase(act(state(asked, going, node(B)), answer)[0]), Opening)
    assert isinstance(phase(act(state(asked, going, node(B), unheard), answer)[0]), Stopping)


@pytest.mark.parametrize(("again_s", "earlier"), [(None, 0.0), (20.0, 580.0), (1e6, 0.0)])
def test_a_question_that_was_too_early_comes_again_in_time_and_never_later(
    again_s: float | None, earlier: float
) -> None:
    no = proposal(A, is_worth_it=False, ask_again_s=again_s)
    before = state(UNFORCED, considered_at=NOW)
    assert before.options.reconsider_s == 600.0
    after, _ = act(before, PlanFound(NOW, QUESTION.request, no))
    assert after.active is not None
    assert after.active.asked.at == NOW - earlier


def test_a_rollback_whose_plan_was_refused_is_not_asked_about_at_every_tick() -> None:
    waits = state(
        Waiting("a reason", NOW - 50),
        job=job(saving=KEPT),
        orders=(BACK,),
        is_refused=True,
        considered_at=NOW - 5,
    )
    assert not [each for each in act(waits, Ticked(NOW))[1] if isinstance(each, RequestPlan)]


@pytest.mark.parametrize("kind", ["pause", "resume", "cancel"])
def test_an_order_for_a_job_that_nobody_knows_is_settled(kind: str) -> None:
    after, commands = act(state(), IntentGiven(NOW, order(kind, "ghost")))
    assert phase(after) == Running(BEGAN)
    assert commands == (SettleIntent("order"),)


def test_what_an_operator_gives_as_the_reason_stands_with_the_job() -> None:
    after, _ = act(state(), IntentGiven(NOW, order("pause", reason="lunch")))
    stopping = phase(after)
    assert isinstance(stopping, Stopping)
    assert stopping.reason == "lunch"


def test_who_is_resumed_looks_anew_whether_its_checkpoint_can_be_read() -> None:
    check = Check(durable(30), None, "a byte is wrong")
    held = state(Held("torn", BEGAN), job=job(state="held"), generation=CLOSED, check=check)
    after, _ = act(held, IntentGiven(NOW, order("resume")))
    assert after.active is not None
    assert after.active.checkpointing.check is None


@pytest.mark.parametrize(("failures", "forgiven"), [(1, True), (3, False)])
def test_only_who_was_on_the_smallest_plan_has_to_prove_itself_for_longer(
    failures: int, forgiven: bool
) -> None:
    before = state(failures=failures, comebacks=3)
    assert before.active is not None
    assert before.active.progress.step - G.restore.point.step == before.options.steps_of_health + 10
    after, _ = act(before, Ticked(NOW))
    assert after.active is not None
    assert (after.active.attempts.failures == 0) is forgiven


# ---- storage ------------------------------------------------------------------------------------


def test_a_commit_of_another_job_that_fails_is_none_of_ours() -> None:
    before = state(commit=Commit(Point(39, 3)), job=job(saving=KEPT))
    after, _ = act(before, CommitFailed(NOW, JobId("other"), Point(39, 3), "the disk is full"))
    assert after.active is not None
    assert after.active.checkpointing.commit == Commit(Point(39, 3))
    assert after.active.checkpointing.trouble == ""


def test_a_failure_that_is_told_late_does_not_end_the_next_commit() -> None:
    before = state(commit=Commit(Point(40, 3)), job=job(saving=KEPT))
    after, _ = act(before, CommitFailed(NOW, JOB, Point(39, 3), "the disk was full"))
    assert after.active is not None
    assert after.active.checkpointing.commit == Commit(Point(40, 3))


def test_nothing_is_forgotten_while_the_next_generation_is_opened() -> None:
    assert release_now(state(OPENING)) is None


def test_what_is_to_be_made_durable_is_kept_however_much_is_sealed_after_it() -> None:
    assert release_now(state()) == Point(40, 3)
    assert release_now(state(securing=Securing(Point(39, 3), NOW + 9))) == Point(39, 3)


def test_what_is_made_durable_before_a_stop_is_told_to_the_agents_that_have_it() -> None:
    point = Point(40, 3)
    asked = state(securing=Securing(point, NOW + 9))
    assert answer_to(asked, report(A), None).upload == point
    assert answer_to(state(), report(A), None).upload is None


def test_a_pause_waits_for_nothing_once_a_node_is_lost() -> None:
    """What it had will not become durable any more, and the job goes nowhere."""
    parked = node(A, report(A, "stopped", sealed=(40,)))
    lost = node(B, report(B, "stopped", sealed=(40,)), lost_at=NOW - 1, why_lost="gone")
    pausing = Stopping("paused", "lunch", NOW + 20)
    before = state(pausing, parked, lost, generation=STOPPED, job=job(saving=KEPT))
    assert isinstance(phase(act(before, Ticked(NOW))[0]), Closing)


def test_a_checkpoint_is_made_of_the_newest_step_and_once() -> None:
    before = state(job=job(saving=KEPT))
    after, _ = act(before, IntentGiven(NOW, order("checkpoint", id_="now")))
    assert after.active is not None
    assert after.active.checkpointing.securing is not None
    assert after.active.checkpointing.securing.point == Point(40, 3)
    done, commands = act(replace(after, durables={JOB: durable(40)}), Ticked(NOW + 1))
    assert done.active is not None
    assert done.active.checkpointing.securing is None
    assert SettleIntent("now") in commands


def test_a_checkpoint_waits_for_a_step_of_which_all_is_there() -> None:
    bare = (node(n, report(n, sealed=())) for n in (A, B))
    before = state(None, *bare, job=job(saving=KEPT), orders=(order("checkpoint", id_="now"),))
    after, commands = act(before, Ticked(NOW))
    assert after.active is not None
    assert (after.active.checkpointing.securing, commands) == (None, ())
    assert orders_of(after) == ["now"]


def test_a_checkpoint_of_a_job_that_names_no_place_is_refused_at_once() -> None:
    before = state(job=job())
    commands = decide(before, IntentGiven(NOW, order("checkpoint", id_="now")))[1]
    said = [each.text for each in commands if isinstance(each, Note)]
    assert said == ["no checkpoint: the job names no place for them"]
    assert SettleIntent("now") in commands


@pytest.mark.parametrize(
    ("began", "is_thorough"),
    [
        ((Restore(Point(30, 3), "durable"), 30), True),
        ((Restore(Point(30, 3), "durable"), 31), False),
        ((Restore(Point(30, 2), "memory"), 30), False),
    ],
    ids=["came to nothing", "did a step", "began elsewhere"],
)
def test_a_checkpoint_from_which_nothing_came_is_read_byte_by_byte(
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


def test_what_is_told_when_no_job_is_there_changes_no_commit() -> None:
    nobody = replace(state(), active=None)
    event = CommitFailed(NOW, JOB, Point(39, 3), "the disk was full")
    assert act(nobody, event)[0].active is None


def test_only_who_lives_is_a_place_for_a_second_copy() -> None:
    """One copy on the only node is all that can be had."""
    alone = node(A, report(A, sealed=(40,)))
    lost = node(B, report(B, sealed=()), lost_at=NOW - 1, why_lost="gone")
    assert release_now(state(None, alone, node(B, report(B, sealed=())))) is None
    assert release_now(state(None, alone, lost)) == Point(40, 3)


@pytest.mark.parametrize(("kept", "becomes"), [(20, Stopping), (40, Closing)])
def test_a_pause_waits_for_the_step_it_came_to_and_for_no_older_one(
    kept: int, becomes: type[Phase]
) -> None:
    nodes = (node(n, report(n, "stopped", sealed=(40,))) for n in (A, B))
    pausing = Stopping("paused", "lunch", NOW + 20)
    before = state(pausing, *nodes, generation=STOPPED, job=job(saving=KEPT))
    after, _ = act(replace(before, durables={JOB: durable(kept)}), Ticked(NOW))
    assert isinstance(phase(after), becomes)


def test_a_new_generation_has_none_of_the_last_ones_errands() -> None:
    errands = {
        "commit": Commit(Point(39, 3)),
        "securing": Securing(Point(39, 3), NOW + 9),
        "check": Check(durable(20)),
    }
    record = replace(G4, number=4)
    before = state(Opening(record, proposal()), step=55, **errands)
    after, _ = act(before, GenerationWritten(NOW, record))
    assert after.active is not None
    assert (after.active.progress.step, after.durables) == (40, before.durables)
    assert [getattr(after.active.checkpointing, name) for name in errands] == [None, None, None]


def test_who_speaks_though_its_lease_is_gone_keeps_what_it_has() -> None:
    """A wall may stand between its agent and the store alone."""
    away = node(B, absent_since=NOW - 3, heard_at=NOW - 1)
    silent = replace(away, heard_at=NOW - 5)
    for b, is_there in ((away, True), (silent, False)):
        now = state(None, node(A), b)
        assert now.active is not None
        assert (B in {id_ for id_, _ in in_memory(now, now.active)}) is is_there


def test_the_older_checkpoint_that_was_opened_is_the_newest_from_then_on() -> None:
    record = replace(G4, restore=Restore(Point(20, 3), "durable"))
    before = replace(state(Opening(record, proposal(), durable(20))), durables={JOB: durable(30)})
    after, _ = act(before, GenerationWritten(NOW, record))
    assert after.durables == {JOB: durable(20)}


def test_a_job_begins_from_the_checkpoint_that_it_was_submitted_with() -> None:
    other = job(id=JobId("other"), state="queued")
    after, _ = act(state(), JobSubmitted(NOW, other, durable(70)))
    assert after.durables == {other.id: durable(70)}


def test_a_member_that_may_be_back_in_a_moment_is_a_place_for_a_copy() -> None:
    a = node(A, report(A, sealed=(40, 41)))
    b = node(B, report(B, sealed=(40,)), absent_since=NOW - 1, heard_at=NOW - 0.5)
    assert release_now(state(None, a, b)) == Point(40, 3)


def test_who_stands_by_without_a_lease_is_no_place_for_a_copy() -> None:
    alone = replace(G, members=(A,))
    a = node(A, report(A, sealed=(40,)))
    away = node(B, report(B, "idle", sealed=()), absent_since=NOW - 1)
    assert release_now(state(None, a, away, generation=alone)) == Point(40, 3)
    there = replace(away, standing=Present())
    assert release_now(state(None, a, there, generation=alone)) is None
