"""Records in the store, which outlive every process, and agents' complete reports; see codec."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal, NewType

from agents.protocol.versions import UNNUMBERED, Protocol

NodeId = NewType("NodeId", str)
"""A node's id: one life of a machine. After a reboot, or a return, it is another node."""
JobId = NewType("JobId", str)


def name_in(id_: NodeId) -> str:
    """Return the machine's name, with which a node's id begins: its boot and its start follow."""
    return id_.rsplit(".", 2)[0]


NodeState = Literal["joining", "ready", "draining", "cordoned"]
GenerationState = Literal["open", "stopping", "closed"]
JobState = Literal["queued", "running", "paused", "held", "done", "failed", "cancelled"]
LIVE: frozenset[JobState] = frozenset({"running", "held"})
"""States of a job that occupies the cluster."""
ENDED: frozenset[JobState] = frozenset({"done", "failed", "cancelled"})
Taking = Literal[
    "idle", "fetching", "rebuilding", "verifying", "running", "stopped", "broken", "failed"
]
"""What a node does in its generation. ``stopped``: parked at the end of a step, all sealed.
``broken``: it lost a peer, is healthy, waits for the leader. ``failed``: a process has ended."""


@dataclass(frozen=True, slots=True, order=True)
class Fence:
    """Orders messages by leader and generation; agents refuse one below the highest seen."""

    term: int
    generation: int


@dataclass(frozen=True, slots=True)
class Abort:
    """A leader's order to end all generations of the job up to this one."""

    job: JobId
    fence: Fence


@dataclass(frozen=True, slots=True)
class Leader:
    """The record of the leading sailord; it exists as long as its lease."""

    daemon: str
    """A random id of the sailord process."""
    host: str
    boot_id: str
    pid: int
    state: str
    """The id of its state folder."""
    address: str
    """``host:port``, where agents report."""
    lease: int
    protocol: Protocol = UNNUMBERED


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A registered node; the record is deleted when its lease expires."""

    id: NodeId
    name: str
    zone: str
    machine: str
    gpu: str
    gpus: int
    address: str
    state: NodeState = "joining"
    leaves_at: float | None = None
    """When the machine will be gone, in seconds since the epoch, if a notice said so."""
    spot: bool = False
    lease_s: float = 0.0
    """The lease: without renewal the record is deleted after this time. 0: not given."""
    protocol: Protocol = UNNUMBERED
    proves_reads: bool = False
    """Its workers prove with a grant what they read from others; earlier ones show a ticket."""


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A point of a job: ``step`` steps are done, the last of them by ``generation``."""

    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class Restore:
    """The point from which a generation begins."""

    point: Point
    source: Literal["start", "memory", "durable"]
    """The untrained model, sealed snapshots on nodes, or a committed checkpoint."""


FIRST = Restore(Point(0, 0), "start")


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """The predicted compute time of each rank per step, without waiting for others."""

    seconds: tuple[float, ...]
    relative_error: float = 0.0
    """The expected relative error of the prediction."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The predicted peak of a rank's device memory, in bytes."""

    tensors: int
    context: int
    """Held by the driver and the framework before the first tensor."""


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """A generation: its plan, restore point and members never change."""

    job: JobId
    number: int
    state: GenerationState
    plan: str
    """The hash under which the plan is stored."""
    members: tuple[NodeId, ...]
    restore: Restore
    term: int
    """The term of the leader that wrote this record."""
    reason: str
    lineage: tuple[Point, ...] = ()
    """The restore points of the last generations before this one, newest first."""
    fallback: Point | None = None
    """Of past generations only this and the restore point are needed: the newest that the loss of
    any one node leaves. ``None``: all may be needed."""
    memory_every: int = 1
    """Steps between two snapshots in memory."""
    persist_every: int | None = None
    """Steps between two checkpoints, a multiple of ``memory_every``; ``None``: there are none."""
    usd_per_hour: float | None = None
    """The price of its plan; ``None``: a price is unknown."""
    busy: ComputeTimes | None = None
    """Of its plan; ``None``: not predicted."""
    peaks: tuple[Peak, ...] = ()
    """By rank; empty: not predicted."""
    worths: tuple[tuple[str, float], ...] = ()
    """What one GPU of each kind is worth to the job, relative to the fastest; see ``Proposal``."""
    step_s: float = 0.0
    """Seconds of a step, as predicted or, if longer, as measured, for time limits; 0: unknown."""
    predicted_s: float = 0.0
    """Predicted seconds of a step; 0: unknown."""
    wait_s: float = 600.0
    """How long a rank waits for a peer that is not known to be lost."""
    next_move_s: float | None = None
    """Predicted seconds of a move from it; ``None``: unknown, it leaves nodes at their notice."""
    stop_at: int | None = None
    """While stopping: the step at whose end all ranks should stop. They seal where they do stop."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Pieces ``first`` to ``end - 1`` of one layer: its atoms, then the piece that is not cut."""

    layer: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """A complete, checked snapshot: the pieces of a point that one node holds in memory."""

    point: Point
    holds: tuple[Holding, ...]


SEAL_SLACK = 2.0
"""How many times the announced duration a seal may take."""


@dataclass(frozen=True, slots=True)
class Sealing:
    """After a loss: workers still seal the state of ``step``, or of the step before."""

    step: int
    ready_in_s: float
    """Expected seconds from the first announcement on."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Workers wait unusually long for other ranks: which, what they do, and on which nodes."""

    text: str
    nodes: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True)
class Uploaded:
    """An object that one node has uploaded for a point; its URI is never reused."""

    point: Point
    uri: str
    bytes: int
    checksum: str
    """Of the object's header, which holds the checksums of its pieces."""
    holds: tuple[Holding, ...]
    """The pieces to read from this object."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The metrics of a script's evaluation data after a number of steps."""

    step: int
    metrics: tuple[tuple[str, float | None], ...]
    """By name; ``None``: not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMeasurements:
    """What a node's workers have measured."""

    loss: float | None = None
    """Of the last step."""
    tokens_per_s: float | None = None
    """Of the whole job, as last measured by the workers."""
    stall_s: float | None = None
    """How long the last snapshots paused training, on average."""
    late_s: float | None = None
    """The part of ``stall_s`` that waited for the previous snapshot to be sealed or replicated."""
    settle_s: float | None = None
    """The interval at which the next snapshot need not wait for the previous one."""
    phases: tuple[tuple[str, float], ...] = ()
    """Durations of fetch, rebuild, verify and first_step, as far as they are done."""
    busy: tuple[tuple[int, float], ...] = ()
    """By rank: recent compute time per step, without waiting for others."""
    evaluation: Evaluation | None = None
    """The last one of this generation."""
    earlier_evaluations: tuple[Evaluation, ...] = ()
    """Evaluations before the last, the oldest first, since a report may replace unsent ones."""
    unlogged: str = ""
    """Why loggers of the job's script are not used any more."""

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The last evaluations, the oldest first."""
        return self.earlier_evaluations + (() if self.evaluation is None else (self.evaluation,))


PREPARING = "its work folder is being prepared"
"""Why a node is unfit while it fetches and sets up a script's folder."""


@dataclass(frozen=True, slots=True)
class Report(NodeMeasurements):
    """An agent's report of its node, complete."""

    node: NodeId
    number: int
    """Grows with each report of this node; one with a lower number is dropped."""
    heard: Fence
    """The highest fence it has seen; it refuses messages below."""
    generation: int = 0
    """The generation of ``taking``, unless that is ``idle``."""
    taking: Taking = "idle"
    step: int = 0
    """Steps done: the last whose update was applied."""
    sealed: tuple[Sealed, ...] = ()
    broken_peers: tuple[NodeId, ...] = ()
    """Nodes to which a worker lost the connection."""
    failure: str = ""
    """Why ``taking`` is ``failed``, or which state is missing that only lost peers had."""
    is_bug: bool = False
    """The job's own fault (an exception, out of memory), not a lost machine."""
    job: JobId | None = None
    """The job of ``sealed``, ``uploaded`` and ``generation``; ``None``: no job."""
    uploaded: tuple[Uploaded, ...] = ()
    """Uploaded objects that are not older than the committed checkpoint."""
    trouble: str = ""
    """Why snapshots are not replicated or uploaded; training goes on meanwhile."""
    fault: str = ""
    """A device fault, if nothing can run on this node."""
    unfit: str = ""
    """Why the live job cannot run here: no room for snapshots, or no prepared work folder."""
    unfit_for: JobId | None = None
    """The job that ``unfit`` is about, if that is its work folder; ``None``: not known."""
    sealing: Sealing | None = None
    """After a loss, until all its workers have sealed their state or failed to."""
    contradicted: tuple[NodeId, ...] = ()
    """Nodes of ranks whose bits most others contradict: why ``taking`` is ``failed``."""
    agreed_at: int | None = None
    """Replicas of its state differ, as ``failure`` says: the last step after which they did not."""
    hang: Hang | None = None
    """Since its last step a worker waits longer than steps take."""

    def speaks_of(self, generation: GenerationRecord) -> bool:
        """Return whether this is about the generation; other jobs use the same numbers."""
        return self.generation == generation.number and self.job in {None, generation.job}


@dataclass(frozen=True, slots=True)
class ReportReply:
    """The leader's reply to a report."""

    term: int | None
    release: Point | None = None
    """The job's snapshots before this point, and those of other generations, can be deleted."""
    upload: Point | None = None
    """Upload this point now, whatever the interval is."""
    every_s: float = 1.0
    """The interval of routine reports; news is reported at once."""


@dataclass(frozen=True, slots=True)
class OutputPart:
    """The output of one worker."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a node's workers."""

    ranks: tuple[int, ...]
    """All ranks that have output, requested or not."""
    parts: tuple[OutputPart, ...]
    mark: str
    """Where the next request continues."""
    ended: int = 0
    """Processes that have ended and are not among these, whose output is kept."""


TimedPass = tuple[Literal["F", "B"], float, float, int]
"""A forward or backward pass: from when to when, and its micro batch."""


@dataclass(frozen=True, slots=True)
class KeptStep:
    """When the passes of one rank ran in a step, in seconds from its beginning on that rank."""

    step: int
    at: float
    """When it was kept, by the node's clock."""
    voted_s: float
    """When the rank read the result of the vote, which all ranks get at once."""
    passes: tuple[TimedPass, ...]
    update: tuple[float, ...]
    """Beginning and end of the optimizer step; empty: none was applied."""
    sums: tuple[tuple[float, float], ...] = ()
    """Beginning and end of gradient sums."""


@dataclass(frozen=True, slots=True)
class KeptSteps:
    """The last steps that a rank has kept, the oldest first."""

    steps: tuple[KeptStep, ...]
    now: float = 0.0
    """When the agent answered, by the clock of ``at``."""


@dataclass(frozen=True, slots=True)
class Durable:
    """A committed checkpoint: its point, and its manifest with that file's hash."""

    point: Point
    manifest: str
    sha256: str


@dataclass(frozen=True, slots=True)
class KnownGeneration:
    """What a node knows of its job's newest generation, for a store that was lost or set back."""

    record: GenerationRecord
    plan: str
    job: str
    """The job file, as it was submitted."""
    durable: Durable | None = None
    """The newest committed checkpoint that it knows of."""


@dataclass(frozen=True, slots=True)
class Saving:
    """How a job's state is saved."""

    uri: str | None = None
    """Where checkpoints go, as an fsspec URI; ``None``: there are no checkpoints."""
    memory_every: int | None = None
    """Steps between two snapshots in memory; ``None``: as often as is cheap."""
    persist_every: int | None = None
    """Steps between two checkpoints; ``None``: the interval is computed."""
    keep: int = 3
    """How many of the last checkpoints are kept."""
    survive: Literal["node", "zone"] = "node"
    """What may be lost without falling back to a checkpoint, if there are enough nodes."""
    start_over: bool = False
    """Restart from step 0 without an order if every copy of the state is lost."""


@dataclass(frozen=True, slots=True)
class Bill:
    """The cost of a job up to ``until``."""

    usd: float = 0.0
    until: float | None = None
    """Seconds since the epoch; ``None``: the job has not run."""
    unpriced_s: float = 0.0
    """How long it ran at unknown prices."""
    usd_max: float | None = None
    """The job is held when it has cost this much."""


@dataclass(frozen=True, slots=True)
class JobPast:
    """What a new leader must know of a job's history."""

    since: float | None = None
    """Since when departures are counted; ``None``: the job never ran."""
    departures: int = 0
    """Members that were lost or have left, up to the start of the last generation."""
    moved_at: float | None = None
    """When the job last reconfigured voluntarily."""
    held_at: float | None = None
    """When the job was last held."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job in the queue."""

    id: JobId
    state: JobState
    _: KW_ONLY
    priority: int = 0
    submitted_at: float = 0.0
    steps: int | None = None
    """The job is done after this many; ``None``: when an operator says so."""
    layers: int = 1
    """Layers of the model, and one for shared tensors."""
    atoms: int = 1
    """Pieces per layer: one for each atom, and one that is not cut."""
    reason: str = ""
    saving: Saving = Saving()
    bill: Bill = Bill()
    past: JobPast = JobPast()
    deadline: float | None = None
    """When it should be done, in seconds since 1970; an event warns if that is at risk."""
    begun: int = 0
    """The step of the checkpoint that it was submitted to continue from."""
    generations_before: int = 0
    """The highest generation in its checkpoint storage at submission; another store counted it."""
    part: tuple[NodeId, ...] | None = None
    """The nodes that it has, while other jobs run beside it; ``None``: all that no other has."""
    coming: tuple[NodeId, ...] = ()
    """Nodes of other jobs that drain to go to it."""
    weight: float = 1.0
    """How large its part should be, beside those of other jobs."""


OrderKind = Literal[
    "preempt", "withdraw", "drain", "cordon", "uncordon", "quarantine",
    "cancel", "pause", "resume", "budget", "priority", "replan", "checkpoint", "rollback",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Order:
    """An operator's order or an agent's notice; idempotent, as it is stored under its id."""

    id: str
    kind: OrderKind
    target: str
    """A node's id or name, or a job's id."""
    leaves_at: float | None = None
    reason: str = ""
    durable: Durable | None = None
    """For a rollback: the checkpoint to go back to."""
    life: str = ""
    """For a node: the id that a name stood for when a leader first saw this; no later one."""
    wrong_bits: bool = False
    """For a quarantine: for wrong bits, not for slowness. For a rollback: ordered by sailord."""
    of_notice: bool = False
    """For a withdrawal: a notice was taken back; drains that were ordered still hold."""
    usd_max: float | None = None
    """For a budget: the most that the job may cost in all, with what it has cost."""
    priority: int = 0
    """For a priority: the job's new one."""
