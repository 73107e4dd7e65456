"""What happens next with the active job: its checkpoints and the next question to the planner.

Both are what the rules would do if nothing else happened. A loss, a notice or a new node comes
first.
"""

from __future__ import annotations

from dataclasses import dataclass

from sailord.core.model.phases import Running, Stopping, Waiting
from sailord.core.model.state import Active, State
from sailord.core.queries.active_job import due_at
from sailord.core.queries.replan_triggers import replan_trigger, usable


@dataclass(frozen=True, slots=True)
class WhatNext:
    """The next checkpoint, and the next question to the planner."""

    checkpoint_step: int | None = None
    """The step after which the next checkpoint is made; null: none is."""
    checkpoint_at: float | None = None
    """When that step will be done, at the present speed; null: not known."""
    question: str = ""
    """Why the planner is asked next; empty: it is being asked, or will not be."""
    question_at: float | None = None
    """When it is asked; null: once a node can be used."""
    written_step: int | None = None
    """The step whose checkpoint should be written by now, and is not durable yet."""


NOTHING_NEXT = WhatNext()


def what_next(state: State) -> WhatNext:
    """Return what happens next if no node is lost, drains or joins, and nothing is ordered."""
    active = state.active
    if active is None:
        return NOTHING_NEXT
    step = _checkpoint_step(state, active)
    question, at = _question(state, active)
    progress = active.progress
    done_at = None
    if step is not None and progress.step_s is not None:
        done_at = max(progress.advanced_at + (step - progress.step) * progress.step_s, state.now)
    return WhatNext(step, done_at, question, at, _written_step(state, active))


def _checkpoint_step(state: State, active: Active) -> int | None:
    """Return the step of the next checkpoint; the last step of a job always gets one."""
    record = active.generation
    if not isinstance(active.phase, Running) or record is None or record.persist_every is None:
        return None
    step, steps, every = active.progress.step, state.job.steps, record.persist_every
    if steps is not None and step >= steps:
        return None
    following = (step // every + 1) * every
    return following if steps is None else min(following, steps)


def _written_step(state: State, active: Active) -> int | None:
    """Return the newest step of the generation for a checkpoint, unless that is durable."""
    record, durable = active.generation, state.durables.get(active.job)
    if record is None or record.persist_every is None:
        return None
    if not isinstance(active.phase, Running | Stopping):
        return None
    step, steps = active.progress.step, state.job.steps
    step = step if step == steps else step // record.persist_every * record.persist_every
    known = record.restore.point.step if durable is None else durable.point.step
    return step if step > max(record.restore.point.step, known) else None


def _question(state: State, active: Active) -> tuple[str, float | None]:
    """Return why and when the planner is asked next."""
    if active.question is not None or not isinstance(active.phase, Running | Waiting):
        return "", None
    trigger = replan_trigger(state, active)
    assert trigger is not None, "a job that runs or waits always has a next question"
    why, failures = trigger.reason, active.attempts.failures
    if isinstance(active.phase, Waiting):
        if not usable(state, active):
            return why, None
        attempts = f"failed attempt{'s' * (failures > 1)}"
        why = f"after {failures} {attempts}: {why}" if failures else why
    return why, max(due_at(state, active, trigger), state.now)
