"""The agent's nouns: what it knows of its node, what happens, and what it orders."""

from __future__ import annotations

from dataclasses import dataclass, field

from agents.protocol import (
    Fence,
    GenerationRecord,
    Intent,
    JobId,
    NodeId,
    NodeRecord,
    Report,
    Sealed,
    Taking,
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
    """Cut off from the store, and without a step for so long, the workers are parked."""
    report_every_s: float = 1.0


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
    stop_at: int | None = None
    """They were told to park at this step's end."""
    abort_sent_at: float | None = None
    kill_sent_at: float | None = None
    is_free: bool = False
    """They left their groups and wait, or are gone: their devices may be used anew."""


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
    left: int = 0
    """The last generation that this node took part in and left: it never goes back to it."""
    sealed: tuple[Sealed, ...] = ()
    silent_since: float | None = None
    """The store does not answer since then."""
    is_registered: bool = False
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
class GenerationRead:
    """What the store says of the job's generation."""

    at: float
    record: GenerationRecord | None


@dataclass(frozen=True, slots=True)
class AbortHeard:
    """A leader says that everything up to this generation is over."""

    at: float
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


@dataclass(frozen=True, slots=True)
class GangExited:
    """No process of the workers is left, and their devices are free."""

    at: float
    generation: int
    failure: str = ""
    is_bug: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotsChanged:
    """What stands sealed in this node's memory now."""

    at: float
    sealed: tuple[Sealed, ...]


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
class NoticeSeen:
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
class EndAsked:
    """The agent was told to stop: the machine shuts down, or somebody stops the service."""

    at: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""

    at: float


Event = (
    SelfTested
    | GenerationRead
    | AbortHeard
    | GangReported
    | GangExited
    | SnapshotsChanged
    | LeaseEnded
    | Registered
    | StoreFailed
    | NoticeSeen
    | NoticeWithdrawn
    | EndAsked
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
class TellStop:
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
class SendReport:
    """Tell the leader how the node stands."""

    report: Report


@dataclass(frozen=True, slots=True)
class RaiseIntent:
    """Store a notice, so that every leader hears of it."""

    intent: Intent


@dataclass(frozen=True, slots=True)
class End:
    """The agent may end now."""


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence for the log."""

    text: str


Command = (
    Register
    | JoinGeneration
    | TellStop
    | AbortGang
    | KillGang
    | SendReport
    | RaiseIntent
    | End
    | Note
)
