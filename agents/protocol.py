"""What the controller, the agents and the store say to each other: nouns, records, reports.

Records stand in the store and outlive everybody; reports are what an agent says of itself right
now, always in full, so that one that was lost is made good by the next. Nothing here knows how
either travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType

NodeId = NewType("NodeId", str)
"""One life of a machine, from an agent's first registration after a boot to its end. A machine
that comes back under its old name is another node."""

JobId = NewType("JobId", str)

NodeState = Literal["joining", "ready", "draining", "cordoned"]
GenerationState = Literal["open", "stopping", "closed"]
JobState = Literal["queued", "running", "paused", "held", "done", "failed", "cancelled"]
Taking = Literal[
    "idle",
    "fetching",
    "rebuilding",
    "verifying",
    "running",
    "stopped",
    "broken",
    "failed",
]
"""What a node does for the generation in which it takes part: ``stopped`` is parked at a step's
end with everything sealed; ``broken`` waits, sound itself, for word about peers to which it lost
the connection; ``failed`` says that a process of it is gone or cannot go on."""


@dataclass(frozen=True, slots=True, order=True)
class Fence:
    """Who may speak: a message with a lower fence than one heard before is refused."""

    term: int
    generation: int


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node as it registered itself; gone from the store when its lease is."""

    id: NodeId
    name: str
    zone: str
    machine: str
    gpu: str
    gpus: int
    address: str
    state: NodeState = "joining"
    leaves_at: float | None = None
    """When the machine goes away, if that was announced (seconds since the epoch)."""
    spot: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A moment in a job's life: ``step`` steps done, the last of them by ``generation``."""

    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Where a generation begins."""

    point: Point
    source: Literal["start", "memory", "durable"]
    """``start`` is the untrained model, ``memory`` sealed snapshots on nodes, ``durable`` a
    committed checkpoint."""


FIRST = Restore(Point(0, 0), "start")


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """One immutable plan, one restore point and one set of members; only ``state`` moves on."""

    job: JobId
    number: int
    state: GenerationState
    plan: str
    """The hash under which the plan is stored."""
    members: tuple[NodeId, ...]
    restore: Restore
    term: int
    """Whose it is: the term of the leader who wrote this record."""
    reason: str
    lineage: tuple[Point, ...] = ()
    """Where the generations before it were left for the next one, newest first."""
    stop_at: int | None = None
    """While stopping: the step at whose end all would best stop. They seal where they do."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Atoms ``first`` to ``end - 1`` of one layer, replicated tensors of the layer included."""

    layer: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """A snapshot that is complete and checked: what one node holds of a point."""

    point: Point
    holds: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What an agent says of its node, in full."""

    node: NodeId
    number: int
    """Grows with each report of this node; one that was overtaken by a later one is dropped."""
    heard: Fence
    """The highest fence it has heard; it refuses what is below."""
    generation: int = 0
    """In which it takes part, if ``taking`` is not ``idle``."""
    taking: Taking = "idle"
    step: int = 0
    """Steps done in this generation's count: the last whose update is applied."""
    sealed: tuple[Sealed, ...] = ()
    broken_peers: tuple[NodeId, ...] = ()
    """Nodes to which a worker's connection broke."""
    failure: str = ""
    """Why ``taking`` is ``failed``, in words."""
    is_bug: bool = False
    """The failure is the job's own (an exception, no memory), not a lost machine."""


@dataclass(frozen=True, slots=True)
class Durable:
    """The newest committed checkpoint of a job."""

    point: Point
    manifest: str
    sha256: str


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job in the queue."""

    id: JobId
    state: JobState
    priority: int = 0
    submitted_at: float = 0.0
    steps: int | None = None
    """It is done after so many; ``None``: when somebody says so."""
    layers: int = 1
    atoms: int = 1
    """Into how many pieces each layer's split tensors are cut (its largest TP degree)."""
    reason: str = ""


IntentKind = Literal[
    "preempt",
    "withdraw",
    "drain",
    "cordon",
    "uncordon",
    "cancel",
    "pause",
    "resume",
    "replan",
]


@dataclass(frozen=True, slots=True)
class Intent:
    """What somebody wants or warns of: stored under its id, so that it has one effect only."""

    id: str
    kind: IntentKind
    target: str
    """A node's id or name, or a job's id."""
    leaves_at: float | None = None
    reason: str = ""
