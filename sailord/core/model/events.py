"""Events: what happened, as facts in the past tense, each with its moment ``at``.

Every command that a rule waits for ends in an event, even in failure.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from agents.protocol.records import (
    Durable,
    GenerationRecord,
    JobId,
    JobRecord,
    NodeId,
    NodeRecord,
    Order,
    Point,
    Report,
)
from sailord.core.model.proposal import Proposal


@dataclass(frozen=True, slots=True)
class Elected:
    """This sailord is the leader; the whole store was read in one snapshot."""

    at: float
    term: int
    _: KW_ONLY
    nodes: tuple[NodeRecord, ...]
    jobs: tuple[JobRecord, ...]
    generations: tuple[GenerationRecord, ...]
    durables: tuple[tuple[JobId, Durable], ...] = ()
    orders: tuple[Order, ...] = ()
    """Orders that still hold, in the order in which they were given."""
    unreadable: frozenset[JobId] = frozenset()
    """Jobs that may have the cluster, but whose records cannot be read."""
    trained_since: tuple[tuple[JobId, float], ...] = ()
    """Since when the last generation of a job trains, by the job's history."""


@dataclass(frozen=True, slots=True)
class Deposed:
    """This sailord is no longer the leader, or cannot be sure of it."""

    at: float


@dataclass(frozen=True, slots=True)
class NodesObserved:
    """All nodes that have a lease at this moment."""

    at: float
    nodes: tuple[NodeRecord, ...]
    unreadable: frozenset[NodeId] = frozenset()
    """Nodes with a lease whose records cannot be read."""
    elsewhere: tuple[NodeRecord, ...] = ()
    """Those that another job has: an agent that restarts is a node of the first job again."""


@dataclass(frozen=True, slots=True)
class Reported:
    """An agent reported."""

    at: float
    report: Report
    others: tuple[Report, ...] = ()
    """Reports of other nodes at the same moment, answered by one decision."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """An agent left a probe unanswered."""

    at: float
    node: NodeId


@dataclass(frozen=True, slots=True)
class OrderGiven:
    """A notice or an operator's order arrived."""

    at: float
    order: Order
    others: tuple[Order, ...] = ()
    """Read at the same moment, in the order in which they were given: the notices of a whole rack
    are one decision."""


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A job was submitted; its record is in the store."""

    at: float
    job: JobRecord
    durable: Durable | None = None


@dataclass(frozen=True, slots=True)
class JobsForgotten:
    """The records of ended jobs were deleted from the store."""

    at: float
    jobs: tuple[JobId, ...]


@dataclass(frozen=True, slots=True)
class PlanFound:
    """The planner answered."""

    at: float
    request: int
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class PlanRefused:
    """There is no plan for these nodes, or the planner could not answer."""

    at: float
    request: int
    why: str
    is_known: bool = True
    """False: the planner could not answer, and the same question may be asked again."""
    is_unpaid: bool = False
    """A limit of the job in dollars is in the way."""


@dataclass(frozen=True, slots=True)
class GenerationWritten:
    """The record is stored."""

    at: float
    record: GenerationRecord


@dataclass(frozen=True, slots=True)
class WriteRefused:
    """The store holds something else than we wrote: another leader exists."""

    at: float


@dataclass(frozen=True, slots=True)
class JobWriteRejected:
    """The store rejects a write of this job for good: it is too long, or not permitted."""

    at: float
    job: JobId
    why: str


@dataclass(frozen=True, slots=True)
class ManifestWritten:
    """The manifest of a checkpoint is in the durable store; it is not yet the newest one."""

    at: float
    job: JobId
    durable: Durable


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """A checkpoint is committed: the newest one of the job."""

    at: float
    job: JobId
    durable: Durable


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The durable store failed, or the checkpoint came too late to count."""

    at: float
    job: JobId
    point: Point
    why: str


@dataclass(frozen=True, slots=True)
class DurableChecked:
    """The newest readable checkpoint was looked for."""

    at: float
    job: JobId
    of: Durable
    """The checkpoint that the store names."""
    found: Durable | None
    why: str = ""
    """What is wrong with the newer ones, or with all."""
    is_away: bool = False
    """The durable store does not answer: its content is unknown."""
    step_max: int | None = None
    """As it was ordered."""


@dataclass(frozen=True, slots=True)
class StoreReturned:
    """The store answers again after an outage, in which leases may have expired."""

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
    | OrderGiven
    | JobSubmitted
    | JobsForgotten
    | PlanFound
    | PlanRefused
    | GenerationWritten
    | WriteRefused
    | JobWriteRejected
    | ManifestWritten
    | CheckpointCommitted
    | CommitFailed
    | DurableChecked
    | StoreReturned
    | Ticked
)
