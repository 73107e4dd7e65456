"""The nouns of checkpoints: what the controller knows of them, what happens, what it orders."""

from __future__ import annotations

from dataclasses import dataclass

from agents.protocol.records import Durable, GenerationRecord, JobId, JobRecord, Point, Uploaded


@dataclass(frozen=True, slots=True)
class Commit:
    """A checkpoint that is being committed."""

    point: Point
    durable: Durable | None = None
    """Its manifest, once that is written."""
    is_storing: bool = False
    """It is on its way into the store; where a generation may begin hangs on it."""


@dataclass(frozen=True, slots=True)
class Securing:
    """A point that agents are told to make durable now, whatever the interval says."""

    point: Point
    until: float


@dataclass(frozen=True, slots=True)
class Check:
    """Whether the newest checkpoint can be read: somebody looks, or has looked."""

    of: Durable
    found: Durable | None = None
    """The newest that can be; ``None``: nobody knows yet, or there is none."""
    why_none: str = ""
    """No checkpoint can be read, and why."""


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
