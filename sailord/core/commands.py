"""Commands: what the controller orders.

Those that write to the store are carried out in their order, each once the one before it is
settled: an order is forgotten only after its effect is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agents.protocol.records import (
    Durable,
    GenerationRecord,
    Intent,
    JobId,
    JobRecord,
    NodeId,
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
    is_safe: bool
    """The smallest plan that is sure to work, after several that failed."""
    slow: Mapping[NodeId, float] = field(default_factory=dict)
    """Members that are not among the nodes, as they take so many times as long as they should: is
    there anything better than to go on with them?"""
    is_urgent: bool = False
    """Nothing runs that could go on while the planner searches."""
    repeats: bool = False
    """The plan that ran last is answer enough: nothing runs, and all its nodes are there."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By kind of GPU: what it was seen to compute over what was predicted."""


@dataclass(frozen=True, slots=True)
class WriteGeneration:
    """Store the record if ``replaces`` still stands there and the term is ours.

    Ends in ``GenerationWritten`` or ``WriteRefused``; a write whose fate is unknown is settled
    by reading, so that repeating this order is harmless.
    """

    record: GenerationRecord
    replaces: GenerationRecord | None
    lowers: Durable | None = None
    """Store this as the newest checkpoint with it, though it is an older one."""
    settles: str = ""
    """The order that it carries out, to be forgotten with it: nobody carries it out again."""


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Describe in the durable store what was uploaded of a point, all of it, each piece once.

    Ends in ``ManifestWritten`` or ``CommitFailed``; under one term the same order always writes
    the same.
    """

    job: JobRecord
    record: GenerationRecord
    parts: tuple[Uploaded, ...]
    point: Point
    parent: Durable | None


@dataclass(frozen=True, slots=True)
class CommitCheckpoint:
    """Store that a checkpoint is the newest, if the term is ours, the generation the present one
    and the step beyond the last. Ends in ``CheckpointCommitted`` or ``CommitFailed``, or in
    ``WriteRefused`` if somebody else leads."""

    durable: Durable
    record: GenerationRecord


@dataclass(frozen=True, slots=True)
class CheckDurable:
    """Find the newest checkpoint that can be read, ``durable`` or an older one.

    Ends in ``DurableChecked``.
    """

    job: JobRecord
    durable: Durable
    is_thorough: bool
    """Read every byte: a generation that began from it came to nothing."""


@dataclass(frozen=True, slots=True)
class CollectGarbage:
    """Remove from the durable store what nobody will ask for again."""

    job: JobRecord
    record: GenerationRecord
    durable: Durable


@dataclass(frozen=True, slots=True)
class GiveIntent:
    """Store what was found out of a node, so that every leader hears of it."""

    intent: Intent


@dataclass(frozen=True, slots=True)
class SettleIntent:
    """An order was carried out: a later leader need not hear of it."""

    id: str


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Store a job's new state."""

    job: JobRecord


@dataclass(frozen=True, slots=True)
class AbortGeneration:
    """Tell agents that a generation is over: what waits in it is broken off."""

    job: JobId
    generation: int
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class WakeAgents:
    """Tell agents to read the store now instead of when the watch gets there."""

    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class ProbeAgent:
    """Ask an agent for its report; ends in ``Reported`` or ``ProbeFailed``."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Resign:
    """Give up leading; whoever leads next reads everything anew."""

    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence for the log and the history."""

    text: str
    job: JobId | None = None
    is_transition: bool = False


Command = (
    RequestPlan
    | WriteGeneration
    | WriteManifest
    | CommitCheckpoint
    | CheckDurable
    | CollectGarbage
    | WriteJob
    | GiveIntent
    | SettleIntent
    | AbortGeneration
    | WakeAgents
    | ProbeAgent
    | Resign
    | Note
)
