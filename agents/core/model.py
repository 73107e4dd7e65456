"""The agent's nouns: what it knows of its node, what happens, and what it orders."""

from __future__ import annotations

from dataclasses import dataclass, field

from agents.protocol.records import (
    Fence,
    GenerationRecord,
    Intent,
    JobId,
    NodeId,
    NodeRecord,
    Point,
    Report,
    Sealed,
    Taking,
    Uploaded,
)

UNHEARD = Fence(0, 0)


@dataclass(frozen=True, slots=True)
class Options:
    """How long an agent waits for what."""

    abort_s: float = 2.0
    """For workers to leave a generation by themselves; then they are killed."""
    kill_s: float = 5.0
    """For killed workers to be gone; then they are killed again."""
    park_s: float = 30.0
    """Cut off from the store, and without a step for so long, the workers are parked; or for the
    time of three steps, if that is longer. Who stood still begins to count anew."""
    nap_s: float = 1.5
    """Without any event for so long, not even a tick, the agent itself stood still: what its
    workers did meanwhile is yet to be heard."""
    report_every_s: float = 1.0
    needed_s: float = 60.0
    """An agent that is to end stays for so long at most while others fetch from its memory."""
    short_s: float = 60.0
    """A node without room for snapshots says so for so long at least, that nobody tries it again
    with each breath of the machine's memory."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What workers measure of themselves; the reports carry it on."""

    loss: float | None = None
    tokens_per_s: float | None = None
    stall_s: float | None = None
    late_s: float | None = None
    settle_s: float | None = None
    phases: tuple[tuple[str, float], ...] = ()
    busy: tuple[tuple[int, float], ...] = ()


UNMEASURED = Measured()


@dataclass(frozen=True, slots=True)
class Gang:
    """This node's workers of one generation, taken together."""

    generation: int
    taking: Taking
    step: int = 0
    advanced_at: float = 0.0
    broken_peers: tuple[NodeId, ...] = ()
    failure: str = ""
    is_bug: bool = False
    measured: Measured = UNMEASURED
    stop_at: int | None = None
    """They were told to park at this step's end."""
    abort_sent_at: float | None = None
    kill_sent_at: float | None = None
    is_free: bool = False
    """They left their groups and wait, or are gone: their devices may be used anew."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The node's memory has no room for the job's snapshots."""

    why: str
    needed_bytes: int
    since: float


@dataclass(frozen=True, slots=True)
class State:
    """Everything that the agent knows."""

    node: NodeRecord
    options: Options = field(default_factory=Options)
    now: float = 0.0
    heard: Fence = UNHEARD
    record: GenerationRecord | None = None
    """The newest generation that the store showed; ``None``: there is no job."""
    job: JobId | None = None
    """Whose generations ``heard`` and ``left`` count."""
    has_read: bool = False
    """The store was read since this agent began: before that, workers it found are let be."""
    gang: Gang | None = None
    idle_since: float = 0.0
    """When the last workers left."""
    left: int = 0
    """The last generation that this node took part in and left: it never goes back to it."""
    sealed: tuple[Sealed, ...] = ()
    """What of ``job`` stands sealed in this node's memory."""
    uploaded: tuple[Uploaded, ...] = ()
    """What of ``job`` this node has brought to the durable store."""
    trouble: str = ""
    shortage: Shortage | None = None
    """Of the job: no plan can use this node until it has room."""
    silent_since: float | None = None
    """The store does not answer since then."""
    woken_at: float = 0.0
    """When the agent last went on after it had stood still."""
    is_registered: bool = False
    is_sound: bool = False
    """The devices were tried and found sound, and none has broken since."""
    fault: str = ""
    """What is wrong with a device that broke in use."""
    is_leaving: bool = False
    """The agent itself was told to end; it does so when no worker needs it."""
    notices: frozenset[str] = frozenset()
    reports: int = 0
    last_report: Report | None = None
    reported_at: float = float("-inf")


# ---- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SelfTested:
    """The devices were tried: the node is ready for work, or ``why_not``."""

    at: float
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class DeviceFailed:
    """A device that was sound is so no more: what runs on it computes nothing that counts."""

    at: float
    fault: str


@dataclass(frozen=True, slots=True)
class GenerationRead:
    """What the store says of the job's generation."""

    at: float
    record: GenerationRecord | None
    durable: Point | None = None
    """The committed checkpoint of its job."""


@dataclass(frozen=True, slots=True)
class AbortReceived:
    """A leader says that everything of the job up to this generation is over."""

    at: float
    job: JobId
    fence: Fence


@dataclass(frozen=True, slots=True)
class GangReported:
    """The workers' word; ``idle``: they left the generation's groups and wait for another."""

    at: float
    generation: int
    taking: Taking
    step: int = 0
    broken_peers: tuple[NodeId, ...] = ()
    failure: str = ""
    is_bug: bool = False
    measured: Measured = UNMEASURED
    room_needed: int = 0
    """It failed since so many bytes must be free for snapshots, and are not."""


@dataclass(frozen=True, slots=True)
class GangExited:
    """No process of the workers is left, and their devices are free."""

    at: float
    generation: int
    failure: str = ""
    is_bug: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotsChanged:
    """What stands sealed in this node's memory now; of a job that is not ours it is nothing."""

    at: float
    sealed: tuple[Sealed, ...]
    job: JobId | None = None
    """``None``: of the only job that there is."""


@dataclass(frozen=True, slots=True)
class UploadDone:
    """This node has brought something to the durable store of a job."""

    at: float
    job: JobId
    uploaded: Uploaded


@dataclass(frozen=True, slots=True)
class TroubleChanged:
    """What keeps a job's snapshots from where they should be, in words; empty: nothing does."""

    at: float
    job: JobId
    trouble: str


@dataclass(frozen=True, slots=True)
class FreeMemoryMeasured:
    """So much is free for snapshots now; only told while there was too little."""

    at: float
    free_bytes: int


@dataclass(frozen=True, slots=True)
class ReleaseReceived:
    """A leader says that of the job's snapshots before this point nobody will ask again."""

    at: float
    term: int
    job: JobId
    point: Point


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A job of which there are snapshots here is over."""

    at: float
    job: JobId


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The node is no longer in the store."""

    at: float


@dataclass(frozen=True, slots=True)
class Registered:
    """The node stands in the store as this record says."""

    at: float
    node: NodeRecord


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The store did not answer."""

    at: float


@dataclass(frozen=True, slots=True)
class NoticeGiven:
    """The machine goes away; ``leaves_at`` if it was said when."""

    at: float
    id: str
    leaves_at: float | None = None


@dataclass(frozen=True, slots=True)
class NoticeWithdrawn:
    """The machine stays after all."""

    at: float
    id: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The agent was told to stop: the machine shuts down, or somebody stops the service."""

    at: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""

    at: float


Event = (
    SelfTested
    | DeviceFailed
    | GenerationRead
    | AbortReceived
    | GangReported
    | GangExited
    | SnapshotsChanged
    | UploadDone
    | TroubleChanged
    | FreeMemoryMeasured
    | ReleaseReceived
    | JobEnded
    | LeaseEnded
    | Registered
    | StoreFailed
    | NoticeGiven
    | NoticeWithdrawn
    | StopRequested
    | Ticked
)


# ---- commands ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """Put the node into the store under a lease; ends in ``Registered`` or ``StoreFailed``."""

    node: NodeRecord


@dataclass(frozen=True, slots=True)
class JoinGeneration:
    """Let the workers take part: those that wait, or new ones where there are none."""

    record: GenerationRecord


@dataclass(frozen=True, slots=True)
class SendStop:
    """Tell the workers at which step's end to park."""

    generation: int
    stop_at: int


@dataclass(frozen=True, slots=True)
class AbortGang:
    """Break off what the workers wait for; they seal nothing, leave their groups, and wait."""

    generation: int


@dataclass(frozen=True, slots=True)
class KillGang:
    """Kill the workers; ends in ``GangExited``. What they sealed stays."""

    generation: int


@dataclass(frozen=True, slots=True)
class ReleaseSnapshots:
    """Give back the memory of what is needless now that the point is safe."""

    job: JobId
    safe: Point
    running: int
    """The generation that runs here: the last points of it stay; 0: none does."""


@dataclass(frozen=True, slots=True)
class DeleteJobSnapshots:
    """Give back the memory of all snapshots of a job that is over."""

    job: JobId


@dataclass(frozen=True, slots=True)
class SendReport:
    """Tell the leader how the node stands."""

    report: Report


@dataclass(frozen=True, slots=True)
class StoreIntent:
    """Store a notice, so that every leader hears of it."""

    intent: Intent


@dataclass(frozen=True, slots=True)
class Exit:
    """The agent may end now."""


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence for the log."""

    text: str


Command = (
    Register
    | JoinGeneration
    | SendStop
    | AbortGang
    | KillGang
    | ReleaseSnapshots
    | DeleteJobSnapshots
    | SendReport
    | StoreIntent
    | Exit
    | Note
)
