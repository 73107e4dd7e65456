"""States of an agent for tests of single decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agents.core.decide import decide
from agents.core.model import Command, Event, Gang, Note, SendReport, State
from agents.protocol.records import (
    Fence,
    GenerationRecord,
    Holding,
    JobId,
    NodeId,
    NodeRecord,
    Point,
    Report,
    Restore,
    Sealed,
    Uploaded,
)

JOB = JobId("job")
OTHER = JobId("other")
ME, PEER = NodeId("me"), NodeId("peer")
TERM = 7
NOW = 1000.0
NODE = NodeRecord(ME, "machine", "zone", "box", "A100-40", 1, "here:1", "ready")
G = GenerationRecord(
    JOB, 3, "open", "plan", (ME, PEER), Restore(Point(10, 2), "memory"), TERM, "a reason"
)
G4 = replace(G, number=4, restore=Restore(Point(40, 3), "memory"))
WITHOUT_US = replace(G4, members=(PEER,))
CLOSED = replace(G, state="closed")
RUNS = Gang(3, "running", step=40, advanced_at=NOW - 1)
FAILED = replace(RUNS, taking="failed", failure="no memory")
SEALED = (Sealed(Point(40, 3), (Holding(0, 0, 1),)),)


def state(gang: Gang | None = RUNS, **others: Any) -> State:
    """Return a registered agent with workers in the third generation."""
    made = State(
        NODE,
        now=NOW,
        heard=Fence(TERM, 3),
        record=G,
        job=JOB,
        has_read_store=True,
        gang=gang,
        left=2,
        sealed=SEALED,
        is_registered=True,
        is_healthy=True,
    )
    return replace(made, **others)


def idle(**others: Any) -> State:
    """Return an agent without workers and without a generation to join."""
    return state(None, **{"left": 3, **others})


def aborted(at: float = NOW) -> Gang:
    return replace(RUNS, abort_sent_at=at)


def vote(step: int, of: int = 3) -> Uploaded:
    return Uploaded(Point(step, of), f"{of}-{step}", 1, "", (Holding(0, 0, 1),))


def act(before: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """Decide; return the commands without notes and reports."""
    after, commands = decide(before, event)
    return after, tuple(each for each in commands if not isinstance(each, Note | SendReport))


def said(before: State, event: Event) -> list[Report]:
    """Return the reports that the event causes."""
    _, commands = decide(before, event)
    return [each.report for each in commands if isinstance(each, SendReport)]
