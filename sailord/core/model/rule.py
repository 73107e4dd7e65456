"""What a rule answers: ``PASS``, ``WAIT`` or a ``Step``.

A rule is a pure function of the state and the active job: it sees no event, reads no clock, draws
nothing at random, and touches no file and no network. What it wants done is a command of its step.
Helpers of rules return the same type; their PASS means: done, go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final, Literal, NamedTuple

from agents.protocol.records import JobRecord
from sailord.core.model.commands import Command, Note, Settled, WriteJob
from sailord.core.model.state import State


class NoStep(Enum):
    """The answers of a rule that changes nothing."""

    PASS = "pass"
    WAIT = "wait"


PASS: Final = NoStep.PASS
"""Nothing for this rule to do: ask the next one."""
WAIT: Final = NoStep.WAIT
"""Nothing may happen before another event: ask no further rule."""


class Step(NamedTuple):
    """A new state and the commands that go with it; then the rules are asked from the first on."""

    state: State
    commands: tuple[Command, ...] = ()


RuleAnswer = Step | Literal[NoStep.PASS, NoStep.WAIT]


def write_job(state: State, job: JobRecord) -> Step:
    """Change a job's record, in the state and in the store; no commands if it is the same."""
    if job == state.jobs[job.id]:
        return Step(state)
    return Step(state.with_job(job), (WriteJob(job),))


def state_note(job: JobRecord, orders: Iterable[str] = ()) -> Note:
    """Tell of the state that a job came into, by these orders."""
    ids = tuple(orders)
    settled = Settled(ids, None) if ids else None
    return Note(f"{job.state}: {job.reason}", job.id, is_transition=True, settled=settled)
