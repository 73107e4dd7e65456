"""When a job may begin again from step 0 by itself: not after it lost every copy of its state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import FIRST, Point, Restore
from sailord.core.model.state import Progress
from sailord.core.queries.restore_choice import why_not_from_start
from tests.sailord.core.states import RUNNING, A, generation, node
from tests.sailord.core.states import state as state_of

RUNS = state_of(RUNNING, node(A))
ACTIVE = RUNS.active
assert ACTIVE is not None
LIMIT = RUNS.options.steps_of_health
BEGAN = replace(ACTIVE, generation=generation(restore=FIRST))


def why(step: int, *, state=RUNS, active=BEGAN, restore=FIRST) -> str:
    return why_not_from_start(state, replace(active, progress=Progress(step)), restore)


def test_a_job_whose_copies_are_all_lost_does_not_start_over():
    text = why(163)
    assert "every copy of its state in nodes' memory, of 163 steps, is lost" in text
    assert "a resume begins again from step 0" in text


def test_the_few_steps_before_a_first_copy_are_repeated():
    assert why(LIMIT) == ""
    assert why(LIMIT + 1) != ""


def test_a_job_that_allows_it_starts_over():
    saving = replace(RUNS.job.saving, start_over=True)
    assert why(163, state=RUNS.with_job(replace(RUNS.job, saving=saving))) == ""


def test_a_resume_allows_the_start_from_step_0():
    assert why(163, active=replace(BEGAN, may_start_over=True)) == ""


def test_steps_of_earlier_generations_count():
    far = replace(BEGAN.generation, restore=Restore(Point(90, 3), "memory"))
    assert "of 90 steps" in why(0, active=replace(BEGAN, generation=far))
    stopped = replace(BEGAN.generation, stop_at=51)
    assert "of 50 steps" in why(0, active=replace(BEGAN, generation=stopped))


@pytest.mark.parametrize("source", ["memory", "durable"])
def test_a_job_with_a_copy_of_its_state_resumes(source):
    assert why(163, restore=Restore(Point(160, 1), source)) == ""
