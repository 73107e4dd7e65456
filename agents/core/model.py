"""The agent's state, its events and its commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from agents.protocol.records import (
    Fence,
    GenerationRecord,
    Hang,
    JobId,
    NodeId,
    NodeMeasurements,
    NodeRecord,
    Order,
    Point,
    Report,
    Sealed,
    Sealing,
    Taking,
    Uploaded,
)

UNHEARD = Fence(0, 0)
UNMEASURED = NodeMeasurements()


@dataclass(frozen=True, slots=True)
class Options:
    """Timeouts of the agent; those of the class are constants."""

    abort_s: float = 2.0
    """After an abort, workers that have not left the generation are killed; those that announced a
    seal have longer (``leave_by``)."""
    kill_s: ClassVar[float] = 5.0
    """Killed workers that have not ended are killed again."""
    park_s: float = 30.0
    """Workers are parked when the store has been silent, and no step was done, for this time or for
    that of three steps if that is longer. It counts anew after the agent itself was stopped."""
    nap_s: ClassVar[float] = 1.5
    """A gap between two events, ticks included, after which the agent assumes that it was stopped
    itself and has not yet heard its workers."""
    report_every_s: ClassVar[float] = 1.0
    needed_s: ClassVar[float] = 60.0
    """How long an agent that was asked to exit lets others fetch from its memory."""
    short_s: ClassVar[float] = 60.0
    """The shortest time for which a node reports a lack of room: free memory fluctuates."""


@dataclass(frozen=True, slots=True)
class Gang:
    """This node's workers of one generation."""

    generation: int
    taking: Taking
    step: int = 0
    advanced_at: float = 0.0
    broken_peers: tuple[NodeId, ...] = ()
    failure: str = ""
    is_bug: bool = False
    measured: NodeMeasurements = UNMEASURED
    stop_at: int | None = None
    """The step at which they were ordered to stop."""
    abort_sent_at: float | None = None
    kill_sent_at: float | None = None
    sealing: Sealing | None = None
    """What they seal after a loss; ``None`` once all have sealed, or cannot."""
    sealing_since: float | None = None
    """When they first announced it."""
    is_free: bool = False
    """They have left their process groups or have ended: their devices are free."""
    contradicted: tuple[NodeId, ...] = ()
    """Nodes of ranks whose bits most others contradict."""
    agreed_at: int | None = None
    """Replicas differ: the last step after which they did not."""
    hang: Hang | None = None
    """For whom they wait unusually long."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The node's memory lacks room for the job's snapshots."""

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
    """The highest fence that was seen in the store or in a leader's message."""
    record: GenerationRecord | None = None
    """The newest generation in the store; ``None``: there is none."""
    job: JobId | None = None
    """The job that ``heard`` and ``left`` are about."""
    has_read_store: bool = False
    """The store was read since the agent started; until then it keeps the workers that it found."""
    gang: Gang | None = None
    idle_since: float = 0.0
    """When the last workers left."""
    left: int = 0
    """The last generation that this node has left; it never returns to it."""
    sealed: tuple[Sealed, ...] = ()
    """The job's snapshots in this node's memory."""
    uploaded: tuple[Uploaded, ...] = ()
    """The job's objects that this node has uploaded."""
    trouble: str = ""
    """Why the job's snapshots are not replicated or uploaded; empty: they are."""
    unfit: str = ""
    """Why the live job cannot run on this node, or not yet; empty: it can."""
    unfit_for: JobId | None = None
    """That job; ``None``: not known."""
    shortage: Shortage | None = None
    """No plan can use this node for the job until it has room."""
    store_silent_since: float | None = None
    """Since when the store has not answered."""
    resumed_at: float = 0.0
    """When the agent last resumed after it was stopped itself."""
    is_registered: bool = False
    is_healthy: bool = False
    """The last self-test passed, and no device has failed since."""
    why_not: str = ""
    """Why the last self-test failed."""
    fault: str = ""
    """The fault of a device that failed in use."""
    is_leaving: bool = False
    """The agent was asked to exit, and does so when no worker needs it."""
    notices: frozenset[str] = frozenset()
    """The ids of notices that were given and not withdrawn."""
    reports: int = 0
    """How many were sent."""
    last_report: Report | None = None
    reported_at: float = float("-inf")


# ---- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Event:
    at: float


@dataclass(frozen=True, slots=True)
class SelfTested(_Event):
    """A self-test of the devices ended; ``why_not`` is empty if it passed."""

    why_not: str = ""


@dataclass(frozen=True, slots=True)
class DeviceFailed(_Event):
    """A device failed in use."""

    fault: str


@dataclass(frozen=True, slots=True)
class GenerationRead(_Event):
    """The store was read: the generation that concerns this node."""

    record: GenerationRecord | None
    durable: Point | None = None
    """The job's committed checkpoint."""


@dataclass(frozen=True, slots=True)
class StoreSetBack(_Event):
    """The store's leader has a lower term than was heard: the store is new, or was restored."""

    term: int


@dataclass(frozen=True, slots=True)
class GenerationUnreadable(_Event):
    """The store was read, but not the generation that concerns this node: nothing changes."""


@dataclass(frozen=True, slots=True)
class AbortReceived(_Event):
    """A leader ended all generations of the job up to this one."""

    job: JobId
    fence: Fence


@dataclass(frozen=True, slots=True)
class GangReported(_Event):
    """The gang's status; ``idle``: its workers have left the generation."""

    generation: int
    taking: Taking
    step: int = 0
    broken_peers: tuple[NodeId, ...] = ()
    failure: str = ""
    is_bug: bool = False
    measured: NodeMeasurements = UNMEASURED
    room_needed: int = 0
    """If it failed for lack of memory: the bytes that must be free for snapshots."""
    sealing: Sealing | None = None
    """Some workers still seal their state after a loss."""
    contradicted: tuple[NodeId, ...] = ()
    agreed_at: int | None = None
    hang: Hang | None = None


@dataclass(frozen=True, slots=True)
class GangExited(_Event):
    """All processes of the gang have ended, and their devices are free."""

    generation: int
    failure: str = ""
    is_bug: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotsChanged(_Event):
    """The snapshots in this node's memory have changed."""

    sealed: tuple[Sealed, ...]
    job: JobId | None = None
    """``None``: there is only one job."""


@dataclass(frozen=True, slots=True)
class UploadDone(_Event):
    """An object was uploaded."""

    job: JobId
    uploaded: Uploaded


@dataclass(frozen=True, slots=True)
class TroubleChanged(_Event):
    """The reason has changed why a job's snapshots are not replicated or uploaded; empty: none."""

    job: JobId
    trouble: str


@dataclass(frozen=True, slots=True)
class FreeMemoryMeasured(_Event):
    """How much memory is free for snapshots; sent only during a shortage."""

    free_bytes: int


@dataclass(frozen=True, slots=True)
class UnfitChanged(_Event):
    """The reason has changed why the live job cannot run on this node; empty: it can."""

    why: str
    job: JobId | None = None


@dataclass(frozen=True, slots=True)
class ReleaseReceived(_Event):
    """A leader says that the job's snapshots before this point can be deleted."""

    term: int
    job: JobId
    point: Point


@dataclass(frozen=True, slots=True)
class JobEnded(_Event):
    """A job that has snapshots here has ended, or left this node to another job."""

    job: JobId


@dataclass(frozen=True, slots=True)
class LeaseEnded(_Event):
    """The node's lease has expired."""


@dataclass(frozen=True, slots=True)
class Registered(_Event):
    """The node was written to the store."""

    node: NodeRecord


@dataclass(frozen=True, slots=True)
class StoreFailed(_Event):
    """The store did not answer."""


@dataclass(frozen=True, slots=True)
class NoticeGiven(_Event):
    """The machine will be stopped, at ``leaves_at`` if that is known."""

    id: str
    leaves_at: float | None = None


@dataclass(frozen=True, slots=True)
class NoticeWithdrawn(_Event):
    """A notice was withdrawn."""

    id: str


@dataclass(frozen=True, slots=True)
class StopRequested(_Event):
    """The agent was asked to exit: the service stops, or the machine shuts down."""


@dataclass(frozen=True, slots=True)
class Ticked(_Event):
    """Time has passed."""


Event = (
    SelfTested
    | DeviceFailed
    | GenerationRead
    | StoreSetBack
    | GenerationUnreadable
    | AbortReceived
    | GangReported
    | GangExited
    | SnapshotsChanged
    | UploadDone
    | TroubleChanged
    | FreeMemoryMeasured
    | UnfitChanged
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
    """Write the node to the store under a lease; ends in ``Registered`` or ``StoreFailed``."""

    node: NodeRecord


@dataclass(frozen=True, slots=True)
class JoinGeneration:
    """Start the workers of a generation, or reuse idle ones."""

    record: GenerationRecord


@dataclass(frozen=True, slots=True)
class SendStop:
    """Tell the workers at which step to stop."""

    generation: int
    stop_at: int


@dataclass(frozen=True, slots=True)
class AbortGang:
    """Tell the workers to leave the generation; they may still seal their last step."""

    generation: int


@dataclass(frozen=True, slots=True)
class KillGang:
    """Kill the workers; ends in ``GangExited``. Sealed snapshots stay."""

    generation: int


@dataclass(frozen=True, slots=True)
class ReleaseSnapshots:
    """Delete the snapshots that a safe point has superseded."""

    job: JobId
    safe: Point
    running: int
    """The generation that runs here, whose last points are kept; 0: none runs."""


@dataclass(frozen=True, slots=True)
class DeleteJobSnapshots:
    """Delete all snapshots of a job."""

    job: JobId


@dataclass(frozen=True, slots=True)
class SendReport:
    """Send a report to the leader."""

    report: Report


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Store a notice, so that every leader sees it."""

    order: Order


@dataclass(frozen=True, slots=True)
class Exit:
    """End the agent process."""


@dataclass(frozen=True, slots=True)
class Note:
    """Write a line to the log."""

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
    | StoreOrder
    | Exit
    | Note
)
