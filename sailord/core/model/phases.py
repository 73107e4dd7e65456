"""The phases of a job that has the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from agents.protocol.records import Durable, GenerationRecord, JobState
from sailord.core.model.proposal import Proposal


@dataclass(frozen=True, slots=True)
class Waiting:
    """No generation runs, and the planner was not asked yet or has no plan."""

    reason: str
    since: float


@dataclass(frozen=True, slots=True)
class Starting:
    """The generation is stored; its members fetch state, rebuild and verify."""

    since: float
    deadline: float
    move_s: float
    """Seconds that the planner predicted for this start."""
    trained_since: float | None = None
    """Since when it trains by its history, if an earlier leader saw it begin."""


@dataclass(frozen=True, slots=True)
class Running:
    """Every member trains."""

    since: float
    """When this leader saw it begin; rules use this moment."""
    trained_since: float | None = None
    """Since when it trains by its history, if an earlier leader saw it begin."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """All members park at the end of one step: for another plan, or to leave the cluster."""

    then: Proposal | JobState
    reason: str
    deadline: float


@dataclass(frozen=True, slots=True)
class Opening:
    """The next generation's record is being stored."""

    record: GenerationRecord
    proposal: Proposal
    lowers: Durable | None = None
    """An older checkpoint that counts as the newest from then on."""


@dataclass(frozen=True, slots=True)
class Closing:
    """The end of the generation is being stored."""

    then: JobState
    reason: str


@dataclass(frozen=True, slots=True)
class Held:
    """It waits for an operator, with its snapshots in memory.

    If another job is queued, and no step would be lost by that, it is paused.
    """

    reason: str
    since: float
    tried: tuple[str, ...] = ()
    """Rollbacks, by their order's id, that were ordered before and could not be carried out: they
    wait for ``resume``."""


Phase = Waiting | Starting | Running | Stopping | Opening | Closing | Held
