"""The page's document about a job that a reader chose, among several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agents.protocol.records import Bill, JobId, JobState
from sailord.api.answers.live import ENDED_MAX, DocumentCaches, live_document
from sailord.core.model.phases import Held, Running
from sailord.core.sharing.parts import Parts, whole
from sailord.goodput.core.ledger import Ledger
from sailord.page.merge_patch import merge_patch
from tests.sailord.core.states import (
    BEGAN,
    JOB,
    A,
    B,
    C,
    D,
    active_of,
    generation,
    grouped,
    job,
    node,
    report,
    state,
)
from tests.sailord.page.made_up import job_context, live_context

OTHER, WAITS, ENDED = JobId("other"), JobId("waits"), JobId("ended")
PLAN = {"pipelines": [{"stages": [{"layers": [0, 1], "tp": 1}]}]}
SCHEDULE = {"pipelines": [{"numbers": [0], "groups": [{"rank": 0}]}]}


def resting(id_: JobId, its: JobState, **others: Any) -> Any:
    return replace(job(), id=id_, state=its, **others)


SECOND = state(
    Running(BEGAN),
    *(node(id_, replace(report(id_, step=7, loss=0.5), job=OTHER, busy=((0, 0.2),)))
      for id_ in (C, D)),
    job=job(id=OTHER, part=(C, D), steps=9),
    generation=replace(generation(C, D), job=OTHER),
    step=7,
)  # fmt: skip
REST = (resting(WAITS, "queued"), resting(ENDED, "done", reason="its last step", bill=Bill(usd=3)))


def shared(first_step: int = 40) -> Parts:
    """Two jobs that run, one that waits, and one that has ended."""
    first = state(Running(BEGAN), node(A), node(B), step=first_step)
    first = replace(first, jobs={**first.jobs, **{each.id: each for each in REST}})
    return Parts(first, {OTHER: SECOND})


def document(chosen: JobId | None, parts: Parts | None = None) -> dict[str, Any]:
    parts = parts or shared()
    about = live_context(Ledger(), tuple(parts.all()))
    return live_document(whole(parts), DocumentCaches(), about, job_context(PLAN, SCHEDULE, chosen))


def test_all_jobs_are_listed_and_the_first_one_is_shown() -> None:
    found = document(None)
    assert found["job"]["id"] == found["first"] == JOB
    assert found["order"] == [JOB, OTHER, WAITS, ENDED]
    assert found["jobs"] == {
        JOB: {"state": "running"},
        OTHER: {"state": "running", "step": 7, "steps": 9, "nodes": 2},
        WAITS: {"state": "queued"},
        ENDED: {"state": "done"},
    }


def test_a_chosen_job_is_shown_with_its_own_plan_and_measured_times() -> None:
    found = document(OTHER)
    assert (found["job"]["id"], found["job"]["step"], found["job"]["steps"]) == (OTHER, 7, 9)
    assert found["job"]["measured"]["loss"] == 0.5
    assert found["plan"]["members"] == [C, D]
    assert found["busy"] == {"0": [0.2, None]}
    assert found["jobs"][OTHER] == {"state": "running"}
    assert found["jobs"][JOB] == {"state": "running", "step": 40, "nodes": 2}


def test_a_job_beside_it_that_does_not_train_has_no_speed() -> None:
    fast = replace(SECOND, active=grouped(active_of(SECOND), step_s=0.5))
    rests = replace(fast, active=replace(active_of(fast), phase=Held("it failed", BEGAN)))
    for part, seconds in ((fast, 0.5), (rests, None)):
        found = document(None, replace(shared(), others={OTHER: part}))
        assert found["jobs"][OTHER].get("step_s") == seconds


def test_nodes_of_the_jobs_beside_the_first_say_so() -> None:
    rows = document(None)["nodes"]
    assert [rows[id_].get("job") for id_ in (A, B, C, D)] == [None, None, OTHER, OTHER]


def test_a_job_that_waits_or_has_ended_is_shown_without_a_plan() -> None:
    waits, ended = document(WAITS), document(ENDED)
    assert waits["job"]["place"] == 1
    assert "plan" not in waits
    assert waits["busy"] == {}
    assert (ended["job"]["state"], ended["job"]["reason"]) == ("done", "its last step")
    assert ended["job"]["spent"]["usd"] == 3
    assert "phase" not in ended["job"]
    assert not ended["job"]["spent"]["unpaid"], "it has no budget"
    assert "job" not in document(JobId("nobody"))


def test_a_job_whose_budget_is_spent_says_so() -> None:
    parts = shared()
    spent = replace(parts.first.jobs[WAITS], state="paused", bill=Bill(usd=3.0, usd_max=3.0))
    parts = replace(parts, first=parts.first.with_job(spent))
    assert document(WAITS, parts)["job"]["spent"]["unpaid"]


def test_an_ended_job_stays_listed_while_it_is_chosen_although_newer_ones_have_ended() -> None:
    parts = shared()
    newer = [resting(JobId(f"n{i}"), "done", submitted_at=5000.0 + i) for i in range(ENDED_MAX)]
    jobs = {**parts.first.jobs, **{each.id: each for each in newer}}
    parts = replace(parts, first=replace(parts.first, jobs=jobs))
    assert ENDED not in document(None, parts)["order"]
    assert document(ENDED, parts)["order"][-1] == ENDED


def test_a_step_of_another_job_changes_its_row_alone() -> None:
    patch = merge_patch(document(OTHER), document(OTHER, shared(first_step=41)))
    assert patch == {"jobs": {JOB: {"step": 41}}}


def test_a_held_job_is_one_problem_whichever_job_is_shown() -> None:
    phase = Held("it failed", BEGAN)
    held = state(phase, node(C), node(D), job=job(id=OTHER, state="held"), generation=None)
    parts = replace(shared(), others={OTHER: held})
    resting_too = resting(JobId("stuck"), "held", reason="it failed")
    parts = replace(parts, first=parts.first.with_job(resting_too))
    for chosen in (None, JOB, OTHER, resting_too.id):
        told = document(chosen, parts)["problems"]
        for name in (OTHER, resting_too.id):
            assert sum(f"{name} is held" in each for each in told) == 1, (chosen, told)
