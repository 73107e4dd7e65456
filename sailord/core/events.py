"""Events: what happened, as facts in the past tense, each with its moment ``at``.

Every command ends in an event, even in failure.
"""

from __future__ import annotations

from dataclasses import dataclass

from agents.protocol.records import (
    Durable,
    GenerationRecord,
    Intent,
    JobId,
    JobRecord,
    NodeId,
    NodeRecord,
    Point,
    Report,
)
from sailord.core.proposal import Proposal


@dataclass(frozen=True, slots=True)
class Elected:
    """We lead. Everything that the store holds was read in one look."""

    at: float
    term: int
    nodes: tuple[NodeRecord, ...]
    jobs: tuple[JobRecord, ...]
    generations: tuple[GenerationRecord, ...]
    durables: tuple[tuple[JobId, Durable], ...] = ()
    intents: tuple[Intent, ...] = ()
    """Those that still hold, in the order in which they were given."""


@dataclass(frozen=True, slots=True)
class Deposed:
    """We lead no more, or could no longer be sure of it."""

    at: float


@dataclass(frozen=True, slots=True)
class NodesObserved:
    """All nodes that have a lease at this moment."""

    at: float
    nodes: tuple[NodeRecord, ...]


@dataclass(frozen=True, slots=True)
class Reported:
    """An agent told how it stands."""

    at: float
    report: Report
    others: tuple[Report, ...] = ()
    """Of other nodes, that came in the same moment: one decision answers them all."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """An agent left a probe unanswered."""

    at: float
    node: NodeId


@dataclass(frozen=True, slots=True)
class IntentGiven:
    """Somebody warned of something or ordered something."""

    at: float
    intent: Intent
    others: tuple[Intent, ...] = ()
    """Found in the same look, in the order in which they were given: notices of a whole rack are
    one decision."""


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A job stands in the queue."""

    at: float
    job: JobRecord
    durable: Durable | None = None


@dataclass(frozen=True, slots=True)
class PlanFound:
    """The planner answered."""

    at: float
    request: int
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class PlanRefused:
    """There is no plan for the nodes asked about, or nobody could find out."""

    at: float
    request: int
    why: str
    is_known: bool = True
    """False: this says nothing of the nodes, and the same question is worth another try."""


@dataclass(frozen=True, slots=True)
class GenerationWritten:
    """The store holds this record now."""

    at: float
    record: GenerationRecord


@dataclass(frozen=True, slots=True)
class WriteRefused:
    """The store holds something else than we thought: somebody else leads."""

    at: float


@dataclass(frozen=True, slots=True)
class ManifestWritten:
    """The manifest of a checkpoint stands in the durable store; nothing follows it yet."""

    at: float
    job: JobId
    durable: Durable


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """A job's state is safe in its durable store up to this point."""

    at: float
    job: JobId
    durable: Durable


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The durable store did not take a checkpoint, or it came too late to count."""

    at: float
    job: JobId
    point: Point
    why: str


@dataclass(frozen=True, slots=True)
class DurableChecked:
    """Somebody has looked which checkpoint is the newest that can be read."""

    at: float
    job: JobId
    of: Durable
    """The one that the store names."""
    found: Durable | None
    why: str = ""
    """What is wrong with those that are newer, or with all."""
    is_away: bool = False
    """The durable store does not answer, which says nothing of what it holds."""


@dataclass(frozen=True, slots=True)
class StoreReturned:
    """The store answers again after it was away; leases may have ended meanwhile."""

    at: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""

    at: float


Event = (
    Elected
    | Deposed
    | NodesObserved
    | Reported
    | ProbeFailed
    | IntentGiven
    | JobSubmitted
    | PlanFound
    | PlanRefused
    | GenerationWritten
    | WriteRefused
    | ManifestWritten
    | CheckpointCommitted
    | CommitFailed
    | DurableChecked
    | StoreReturned
    | Ticked
)
