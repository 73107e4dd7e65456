"""The phases of a job that has the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from agents.protocol.records import Durable, GenerationRecord, JobState
from sailord.core.proposal import Proposal


@dataclass(frozen=True, slots=True)
class Waiting:
    """No healthy generation runs; nothing was asked yet, or nothing fits what is there."""

    reason: str
    since: float


@dataclass(frozen=True, slots=True)
class Starting:
    """The generation stands in the store; its members fetch, rebuild and verify."""

    since: float
    deadline: float
    move_s: float
    """What the planner predicted, to be compared with what it takes."""


@dataclass(frozen=True, slots=True)
class Running:
    """Every member trains."""

    since: float


@dataclass(frozen=True, slots=True)
class Stopping:
    """All members park at one step's end: for another plan, or for good."""

    then: Proposal | JobState
    reason: str
    deadline: float


@dataclass(frozen=True, slots=True)
class Opening:
    """The next generation's record is on its way into the store."""

    record: GenerationRecord
    proposal: Proposal
    lowers: Durable | None = None
    """The checkpoint that counts as the newest from then on, where that is an older one."""


@dataclass(frozen=True, slots=True)
class Closing:
    """The generation's end is on its way into the store."""

    then: JobState
    reason: str


@dataclass(frozen=True, slots=True)
class Held:
    """Parked until a person says resume; snapshots stay alive."""

    reason: str
    since: float


Phase = Waiting | Starting | Running | Stopping | Opening | Closing | Held
