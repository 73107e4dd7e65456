"""What happens next with a job: its next checkpoint, and the next question to the planner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sailord.core.model.commands import RequestPlan
from sailord.core.model.events import Ticked
from sailord.core.model.phases import Held, Running, Stopping, Waiting
from sailord.core.model.state import Attempts, Progress, State
from sailord.core.queries.what_next import NOTHING_NEXT, what_next
from tests.sailord.core.states import (
    NOW,
    QUESTION,
    A,
    B,
    C,
    act,
    durable,
    generation,
    job,
    node,
    state,
)

BETTER = "a better plan may exist by now"


def running(every: int | None = 20, *, steps: int | None = None, step: int = 50) -> State:
    return state(
        Running(NOW - 60),
        job=job(steps=steps),
        generation=generation(persist_every=every),
        progress=Progress(step, NOW - 1, 2.0),
    )


def test_next_checkpoint_is_at_the_next_multiple_and_at_the_last_step() -> None:
    found = what_next(running())
    assert (found.checkpoint_step, found.checkpoint_at) == (60, NOW - 1 + 10 * 2.0)
    assert what_next(running(step=60)).checkpoint_step == 80, "that of this step is made already"
    assert what_next(running(steps=55)).checkpoint_step == 55
    assert what_next(running(steps=50)).checkpoint_step is None
    assert what_next(running(None)).checkpoint_step is None
    slow = running()
    assert slow.active is not None
    unknown = replace(slow, active=replace(slow.active, progress=Progress(50, NOW)))
    assert (what_next(unknown).checkpoint_step, what_next(unknown).checkpoint_at) == (60, None)


def test_checkpoint_is_being_written_until_it_is_durable() -> None:
    begun = running().active
    assert begun is not None
    assert begun.generation is not None
    first = begun.generation.restore.point.step
    assert what_next(running(step=first)).written_step is None, "nothing new was made"
    at_50 = running()
    assert what_next(at_50).written_step == 40
    assert what_next(running(steps=50)).written_step == 50, "the last step"
    assert what_next(running(None)).written_step is None
    for step, written in ((20, 40), (40, None)):
        known = replace(at_50, durables={begun.job: durable(step)})
        assert what_next(known).written_step == written


def test_checkpoint_whose_step_is_late_is_not_in_the_past() -> None:
    late = state(generation=generation(persist_every=20), progress=Progress(59, NOW - 90, 2.0))
    assert what_next(late).checkpoint_at == NOW


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (state(considered=frozenset((A, B)), considered_at=NOW - 590), BETTER),
        (state(None, node(A), node(B), node(C, since=NOW - 10)), "machine-c"),
        (
            state(
                Waiting("machine-a failed", NOW - 1),
                attempts=Attempts(failures=2, not_before=NOW + 4),
            ),
            "after 2 failed attempts: machine-a failed",
        ),
    ],
)
def test_the_planner_is_asked_when_it_was_said(before: State, words: str) -> None:
    found = what_next(before)
    assert words in found.question
    assert found.question_at is not None
    early, commands = act(before, Ticked(found.question_at - 0.1))
    assert not any(isinstance(each, RequestPlan) for each in commands)
    _, commands = act(early, Ticked(found.question_at))
    assert any(isinstance(each, RequestPlan) for each in commands)


def test_a_job_without_nodes_waits_for_one_and_no_other_phase_asks() -> None:
    cordoned = node(A, is_cordoned=True), node(B, is_cordoned=True)
    none = state(Waiting("next in the queue", NOW - 60), *cordoned, generation=None)
    assert what_next(none) == replace(NOTHING_NEXT, question="next in the queue")
    assert what_next(state(QUESTION)).question == "", "it is being asked"
    for phase in (Held("no plan", NOW), Stopping("paused", "lunch", NOW + 60)):
        assert what_next(state(phase)) == NOTHING_NEXT
    assert what_next(State()) == NOTHING_NEXT
