"""Commands: what the core has the controller do: write records, ask the planner, tell agents.

Those that write to the store are carried out in their order, each once the one before it is
settled: an order is forgotten only after its effect is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agents.protocol.records import (
    Durable,
    GenerationRecord,
    JobId,
    JobRecord,
    NodeId,
    Order,
    Point,
    Uploaded,
)


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Ask the planner; ends in ``PlanFound`` or ``PlanRefused``."""

    request: int
    job: JobId
    nodes: tuple[NodeId, ...]
    running: GenerationRecord | None
    slow: Mapping[NodeId, float] = field(default_factory=dict)
    """Stragglers and cordoned nodes among the members, which are not among ``nodes``, and how many
    times as long as predicted they take: is a plan without them better than going on with them?"""
    leaving: tuple[NodeId, ...] = ()
    """Members that no plan may use, and that go on until the job has stopped between two steps."""
    is_urgent: bool = False
    """Nothing runs while the planner searches."""
    repeats: bool = False
    """The last plan is a good enough answer: nothing runs, and all its nodes are usable."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By kind of GPU: measured over predicted compute time."""
    ratios: tuple[tuple[int, float], ...] = ()
    """The same by rank, to correct the profile; not while the job waits for the answer."""


@dataclass(frozen=True, slots=True)
class WriteGeneration:
    """Store the record if the store still holds ``replaces`` and the term is ours.

    Ends in ``GenerationWritten`` or ``WriteRefused``. A write whose outcome is unknown is settled
    by reading: the command is idempotent.
    """

    record: GenerationRecord
    replaces: GenerationRecord | None
    lowers: Durable | None = None
    """Store this older checkpoint as the newest one, in the same transaction."""
    settles: str = ""
    """The order that this carries out, forgotten in the same transaction."""


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Write the manifest of a point: the uploaded objects that have each piece exactly once.

    Ends in ``ManifestWritten`` or ``CommitFailed``. Idempotent within a term.
    """

    job: JobRecord
    record: GenerationRecord
    parts: tuple[Uploaded, ...]
    point: Point
    parent: Durable | None


@dataclass(frozen=True, slots=True)
class CommitCheckpoint:
    """Make a checkpoint the newest, if the term is ours, the generation is the present one and the
    step is later than the last one's. Ends in ``CheckpointCommitted`` or ``CommitFailed``, or in
    ``WriteRefused`` if another leader exists."""

    durable: Durable
    record: GenerationRecord


@dataclass(frozen=True, slots=True)
class CheckDurable:
    """Find the newest readable checkpoint, ``durable`` or an older one.

    Ends in ``DurableChecked``.
    """

    job: JobRecord
    durable: Durable
    is_thorough: bool
    """Read every byte: a generation that began from it failed."""
    step_max: int | None = None
    """Only checkpoints of this step or before count."""


@dataclass(frozen=True, slots=True)
class CollectGarbage:
    """Remove checkpoints and uploads from the durable store that are no longer needed."""

    job: JobRecord
    record: GenerationRecord
    durable: Durable


@dataclass(frozen=True, slots=True)
class GiveOrder:
    """Store an order of the leader's own, so that every later leader knows of it."""

    order: Order


@dataclass(frozen=True, slots=True)
class SettleOrder:
    """Forget an order: it was carried out."""

    id: str


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Store a job's record."""

    job: JobRecord


@dataclass(frozen=True, slots=True)
class AbortGeneration:
    """Tell agents that a generation is over: its ranks stop waiting for each other."""

    job: JobId
    generation: int
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class WakeAgents:
    """Tell agents to read the store now, without waiting for their watch."""

    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class ProbeAgent:
    """Ask an agent for its report; ends in ``Reported`` or ``ProbeFailed``."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Resign:
    """Give up leadership."""

    why: str


@dataclass(frozen=True, slots=True)
class Settled:
    """How orders ended."""

    orders: tuple[str, ...]
    """Their ids."""
    step: int | None
    """The step that is durable as ordered, or from which a move that was ordered went on; null:
    a checkpoint or rollback failed, as the text says, or the order is about no step."""


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence for the log; a transition is kept in the job's history."""

    text: str
    job: JobId | None = None
    is_transition: bool = False
    is_detail: bool = False
    """A part of a reconfiguration, which has one summary line at its end."""
    settled: Settled | None = None
    """If it tells how orders ended."""


Write = WriteGeneration | WriteJob | GiveOrder | SettleOrder | CommitCheckpoint
"""Carried out on the store, one after the other."""
Effect = (
    RequestPlan
    | WriteManifest
    | CheckDurable
    | CollectGarbage
    | AbortGeneration
    | WakeAgents
    | ProbeAgent
)
"""Carried out beside each other."""
Command = Write | Effect | Resign | Note
