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
LIVE: frozenset[JobState] = frozenset({"running", "held"})
"""States of a job that has the cluster."""
ENDED: frozenset[JobState] = frozenset({"done", "failed", "cancelled"})
"""Nobody goes on with such a job."""
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
class Abort:
    """A leader's word that all generations of the job up to this one are over."""

    job: JobId
    fence: Fence


@dataclass(frozen=True, slots=True)
class Leader:
    """The record of the leading sailord, which exists as long as its lease."""

    daemon: str
    """Another id with each start of a sailord."""
    host: str
    boot_id: str
    pid: int
    state: str
    """The id of its state folder."""
    address: str
    """``host:port``, where agents report."""
    lease: int


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
    lease_s: float = 0.0
    """After so long without a word it is gone from the store; 0 if it did not say."""


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
class Busy:
    """What each rank is predicted to compute in a step, without waiting for others."""

    seconds: tuple[float, ...]
    """By rank."""
    relative_error: float = 0.0
    """How far the prediction itself may be off."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The memory of its device that a rank is predicted to take when it takes most."""

    tensors: int
    context: int
    """What driver and framework hold before the first tensor."""


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
    memory_every: int = 1
    """After so many steps its members take a snapshot."""
    persist_every: int | None = None
    """After so many steps, a multiple of that, the snapshot is made durable; ``None``: never."""
    usd_per_hour: float | None = None
    """What its plan costs; ``None``: a price is not known."""
    busy: Busy | None = None
    """Predicted of its plan; ``None``: nothing is known."""
    peaks: tuple[Peak, ...] = ()
    """By rank; empty: nobody said."""
    step_s: float = 0.0
    """What a step is taken to take; 0: nobody said."""
    wait_s: float = 600.0
    """No rank waits longer for a peer that is not known to be gone."""
    stop_at: int | None = None
    """While stopping: the step at whose end all would best stop. They seal where they do."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Pieces ``first`` to ``end - 1`` of one layer: its atoms, and then what is not cut."""

    layer: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """A snapshot that is complete and checked: what one node holds of a point."""

    point: Point
    holds: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A vote: what one node has brought to the durable store of a point, under a name for ever."""

    point: Point
    uri: str
    bytes: int
    checksum: str
    """Of the object's header, which holds the checksums of its pieces."""
    holds: tuple[Holding, ...]
    """The pieces that this object is to be read for."""


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
    job: JobId | None = None
    """Whose ``sealed``, ``uploaded`` and ``generation`` these are; none: of no job."""
    loss: float | None = None
    """Of ``step``."""
    tokens_per_s: float | None = None
    """Of the whole job, as the workers measured it last."""
    stall_s: float | None = None
    """How long each of the last snapshots held training up, on average."""
    late_s: float | None = None
    """So much of that since the one before was not sealed yet, or not copied to other nodes."""
    settle_s: float | None = None
    """So long after one is begun the next may be taken without waiting for it."""
    phases: tuple[tuple[str, float], ...] = ()
    """How long the workers took to come to where they are: fetch, rebuild, verify, first_step."""
    busy: tuple[tuple[int, float], ...] = ()
    """Ranks, and how many seconds of a step each computes lately, without waiting for others."""
    uploaded: tuple[Uploaded, ...] = ()
    """What was brought to the durable store and is not below the committed step."""
    trouble: str = ""
    """What keeps snapshots from a buddy or the durable store; training goes on meanwhile."""
    fault: str = ""
    """What is wrong with a device, if nothing may run on this node."""
    no_room: str = ""
    """Why nothing of ``job`` may run on this node: what its snapshots need, and what is free."""

    def speaks_of(self, generation: GenerationRecord) -> bool:
        """Whether it is of this generation; those of another job have the same numbers."""
        return self.generation == generation.number and self.job in {None, generation.job}


@dataclass(frozen=True, slots=True)
class ReportReply:
    """What the leader answers to a report."""

    term: int | None
    release: Point | None = None
    """Of the report's job: of snapshots before this point, and of all that other generations
    left, nobody will ask again."""
    upload: Point | None = None
    """To be brought to the durable store now, whatever the interval says."""
    every_s: float = 1.0
    """How often to say that all goes on; what is news is said at once."""


@dataclass(frozen=True, slots=True)
class OutputPart:
    """What one worker wrote."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Output:
    """What a node's workers wrote."""

    ranks: tuple[int, ...]
    """Those of which there is something to read, whether or not it was asked for."""
    parts: tuple[OutputPart, ...]
    mark: str
    """To be given back by who wants what comes next."""


@dataclass(frozen=True, slots=True)
class Durable:
    """The newest committed checkpoint of a job."""

    point: Point
    manifest: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Saving:
    """How a job's state is to be kept."""

    uri: str | None = None
    """Where checkpoints go, as fsspec reads it; ``None``: nothing outlives the nodes' memory."""
    memory_every: int | None = None
    """Steps from one snapshot in memory to the next; ``None``: as often as costs little."""
    persist_every: int | None = None
    """Steps from one checkpoint to the next; ``None``: as often as pays."""
    keep: int = 3
    """So many of the last checkpoints are kept."""
    survive: Literal["node", "zone"] = "node"
    """What may be lost without a checkpoint being needed, if there are places enough."""


@dataclass(frozen=True, slots=True)
class Bill:
    """What a job has cost, up to a moment."""

    usd: float = 0.0
    until: float | None = None
    """The moment; ``None``: nothing of it ran yet."""
    unpriced_s: float = 0.0
    """How long it ran at prices that nobody knows."""
    usd_max: float | None = None
    """It is held when it has cost so much."""


@dataclass(frozen=True, slots=True)
class Past:
    """What every leader of a job must know of the time before it led."""

    since: float | None = None
    """Since when departures are counted; ``None``: it never had the cluster."""
    departures: int = 0
    """Members that were lost, or left, up to the last generation's beginning."""
    moved_at: float | None = None
    """When the job last moved without having to."""


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
    """With one more for what layers share."""
    atoms: int = 1
    """Pieces of each layer's state: one for each atom, and one for what is not cut."""
    reason: str = ""
    saving: Saving = Saving()
    bill: Bill = Bill()
    past: Past = Past()


IntentKind = Literal[
    "preempt",
    "withdraw",
    "drain",
    "cordon",
    "uncordon",
    "quarantine",
    "cancel",
    "pause",
    "resume",
    "replan",
    "checkpoint",
    "rollback",
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
    durable: Durable | None = None
    """Of a rollback: the checkpoint to go back to."""
    life: str = ""
    """Of a node: the id that was meant by its name, once a leader has heard of it. Whatever is
    started later under that name is another machine."""
