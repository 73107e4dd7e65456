"""The answer to why a job is in its state."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.codec import plain
from agents.protocol.records import Bill, Durable, JobId, Point
from sailord.api.answers.queue_place import after_order, place_text, waits_for
from sailord.api.answers.render import job_view, jobs_view, why_view
from sailord.cli.shared.server import ordered_text
from sailord.core.model.phases import Held, Opening, Running, Waiting
from sailord.text.cluster_text import cure_of_hold, why_text
from sailord.text.cures import spend_more
from tests.sailord.core.states import (
    BEGAN,
    JOB,
    NOW,
    A,
    B,
    active_of,
    generation,
    grouped,
    job,
    proposal,
    state,
)


def waiting(id_: str, priority: int, submitted_at: float):
    return replace(
        job(), id=JobId(id_), state="queued", priority=priority, submitted_at=submitted_at
    )


QUEUE = {each.id: each for each in (waiting("late", 0, 9.0), waiting("first", 0, 5.0))}
URGENT = waiting("urgent", 7, 10.0)
BUSY = state(Running(BEGAN)).with_job(URGENT)
BUSY = replace(BUSY, jobs=BUSY.jobs | QUEUE)


def test_queued_job_lists_the_jobs_before_it() -> None:
    assert waits_for(BUSY, JobId("urgent")) == (JOB,)
    assert waits_for(BUSY, JobId("late")) == (JOB, "urgent", "first")
    told = job_view(BUSY, JobId("late"))
    assert told is not None
    text = why_text(plain(why_view(BUSY, told, {}, (), None)))
    assert text.splitlines()[1] == f"queued behind {JOB}, urgent, first"


def test_facts_of_a_plan_that_no_longer_runs_are_called_the_last() -> None:
    ran = replace(generation(A, B, state="closed"), job=JobId("urgent"), reason="look at the loss")
    known = replace(BUSY, generations={JobId("urgent"): ran})
    of_queued = job_view(known, JobId("urgent"))
    opening = state(Opening(replace(generation(A, number=4), reason="c is lost"), proposal(A)))
    of_opening = job_view(opening, JOB)
    about = {"estimate": {"iteration_s": 0.5}, "why": ["move: gains 3 samples"]}
    assert of_queued is not None
    assert of_opening is not None
    for of, view in ((known, of_queued), (opening, of_opening)):
        lines = why_text(plain(why_view(of, view, about, (), None))).splitlines()
        assert not [line for line in lines if line.startswith("this ")]
        assert "last plan: move: gains 3 samples" in lines
        assert [line for line in lines if line.startswith("last generation: ")]


ALMOST = BUSY.with_job(replace(BUSY.job, steps=100))
ALMOST = replace(ALMOST, active=grouped(active_of(ALMOST), step_s=0.75))


def test_a_queued_job_is_told_how_long_it_waits_and_where_it_goes_on() -> None:
    ran = replace(generation(A, B, state="closed"), job=JobId("urgent"))
    known = replace(ALMOST, generations={JobId("urgent"): ran})
    known = replace(known, durables={JobId("urgent"): Durable(Point(419, 3), "m", "0" * 64)})
    told = f"queued behind {JOB}; {JOB} is done in about 45.0 s"
    assert place_text(ALMOST, JobId("urgent")) == told
    assert place_text(known, JobId("urgent")) == f"{told}; urgent goes on from step 419"
    alone = replace(known, active=None)
    assert place_text(alone, JobId("urgent")) == "queued; urgent goes on from step 419"
    paused = known.with_job(replace(URGENT, state="paused"))
    told = "once it is resumed, urgent goes on from step 419"
    assert place_text(paused, JobId("urgent")) == told, "by itself it does not"
    assert after_order(paused, "pause", JobId("urgent")) == told
    assert place_text(known, JOB) == "", "it has the cluster"
    assert place_text(known, JobId("none")) == ""


def test_a_job_behind_one_that_has_no_plan_is_told_how_it_can_run() -> None:
    waits = replace(active_of(ALMOST), phase=Waiting("no plan", NOW - 60))
    stuck = replace(ALMOST, active=grouped(waits, is_refused=True))
    told = f"{JOB} has the cluster and no plan; sailorctl pause {JOB} lets the next job run"
    assert place_text(stuck, JobId("urgent")) == f"queued behind {JOB}; {told}"
    assert told in after_order(stuck, "resume", JobId("late"))


def test_pause_and_resume_tell_who_gets_the_cluster() -> None:
    assert after_order(ALMOST, "pause", JOB) == (
        "once its last step is saved, urgent gets the cluster"
    )
    told = f"queued behind {JOB}; {JOB} is done in about 45.0 s"
    assert after_order(ALMOST, "resume", JobId("urgent")) == told
    assert after_order(ALMOST, "cancel", JobId("urgent")) == ""
    assert after_order(replace(ALMOST, jobs={JOB: ALMOST.job}), "pause", JOB) == ""
    assert ordered_text("resume j", {"id": "1", "then": told}) == f"resume j: ordered; {told}"
    assert ordered_text("resume j", {"id": "1"}) == "resume j: ordered"


def test_no_end_is_promised_of_a_job_that_does_not_train() -> None:
    for rests in (Held("its script failed", BEGAN), Waiting("no plan", BEGAN)):
        known = replace(ALMOST, active=replace(active_of(ALMOST), phase=rests))
        told = f"queued behind {JOB}; it gets the cluster once {JOB} ends or is paused"
        assert place_text(known, JobId("urgent")) == told
        assert [row.ends_at for row in jobs_view(known).jobs if row.id == JOB] == [None]
    held = replace(ALMOST, active=replace(active_of(ALMOST), phase=Held("it failed", BEGAN)))
    assert after_order(held, "pause", JOB) == "urgent gets the cluster", "nothing is saved"


def test_active_job_waits_for_no_other() -> None:
    assert waits_for(BUSY, JOB) == ()
    told = job_view(BUSY, JOB)
    assert told is not None
    assert "before it" not in why_text(plain(why_view(BUSY, told, {}, (), None)))


def test_cure_of_a_spent_budget_is_not_just_to_resume() -> None:
    def told(usd_max: float) -> str:
        held = state(Held("its budget is spent", BEGAN))
        spent = held.with_job(replace(held.job, bill=Bill(usd=10.0, usd_max=usd_max)))
        view = job_view(spent, JOB)
        assert view is not None
        return why_text(plain(why_view(spent, view, {}, (), None)))

    assert spend_more(JOB) in told(usd_max=10.0)
    assert f"sailorctl resume {JOB}" in told(usd_max=11.0)
    assert "was raised" not in cure_of_hold(JOB, None, "its budget of $10.00 is spent"), "unknown"


def test_a_running_job_tells_what_a_step_takes_and_why_its_plan_stays() -> None:
    stays = "stays: the best plan is 7.2% faster, ±12.8%"
    known = state(Running(BEGAN), said=stays, considered_at=NOW - 60)
    view = job_view(known, JOB)
    assert view is not None
    about = {"estimate": {"iteration_s": 0.5}, "why": ["rejected: 3 stages, 0.9 s"]}
    answer = plain(why_view(known, view, about, (), None))
    lines = why_text(answer | {"cooldowns": ["m in z gets no request for 43.0 s"]}).splitlines()
    asks = "next: the planner is asked in 9 min: a better plan may exist by now"
    assert asks in lines
    assert "next: m in z gets no request for 43.0 s" in lines
    assert "this plan: predicted to take 0.5 s a step" in lines
    assert f"the planner's last answer: {stays}" in lines


def test_nodes_idle_when_the_plan_was_made_are_not_called_idle_now() -> None:
    now = state(Running(NOW - 60), generation=generation(reason="a node came"))
    view = job_view(now, JOB)
    about = {"why": ["idle: 1 of 2 A100-40 in z; does not pay", "bottleneck: stage 1"]}
    assert view is not None
    text = why_text(plain(why_view(now, view, about, (), None)))
    assert "this plan, when it was made: idle: 1 of 2 A100-40 in z" in text
    assert "this plan: bottleneck: stage 1" in text
    assert text.count("a node came") == 1, "the reason is told once"
