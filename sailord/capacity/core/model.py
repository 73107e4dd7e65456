"""State, events and commands of the capacity decisions: plain data.

Fields of ``CapacityRecord`` and of what it holds are keys in the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal
from uuid import UUID, uuid5

from sailord.capacity.core.deadline_model import (
    DeadlineOptions,
    DeadlineState,
    JobProgress,
    PaceRecord,
)
from sailord.capacity.core.rented_instance import RentedInstance
from sailord.providers.interface import (
    DeleteResult,
    InstanceRequest,
    Observation,
    Pool,
    QuotaUsage,
    RefusalKind,
    RequestOutcome,
)

StopCause = Literal["", "parting", "ended"]
"""What a spent total budget demands. ``parting``: save and give back; ``ended``: delete all."""
CooldownKind = Literal[RefusalKind, "boot"]
"""``boot``: its last instance started no agent; a granted request does not end this."""
ENDED_MAX = 1000
"""Names of nodes that are kept after their instances ended."""
COOLDOWN_S: Mapping[CooldownKind, float] = {
    "stockout": 60.0,
    "quota": 300.0,
    "rate": 10.0,
    "permission": 600.0,
    "bad_request": 1800.0,
    "unknown": 60.0,
    "boot": 60.0,
}
"""A pool's first cooldown after a refusal of this kind; each further refusal doubles it."""
_REQUESTS = UUID("0b6b6d0e-6a55-4e0b-9f1e-8f0d3c1f7a52")


@dataclass(frozen=True, slots=True)
class CapacityPolicy:
    """The user's budgets, timeouts and limits."""

    usd_per_hour_max: float | None = None
    usd_max: float | None = None
    parting_s: float = 180.0
    """Stop the job this long before the budget is spent: half to save, half to repeat deletions."""
    look_s: float = 10.0
    """Interval of observations, and so of decisions about money."""
    boot_s: float = 600.0
    """Timeout from a running instance to its registered agent."""
    lost_s: float = 60.0
    """Delete an instance whose agent was lost for this long, whatever the provider says."""
    doubt_s: float = 120.0
    """Give up a request with unknown outcome if no observation shows it this long after that."""
    surplus_s: float = 300.0
    """Delete an instance after it was surplus for this long."""
    delete_again_s: float = 30.0
    rest_max_s: float = 3600.0
    """The longest cooldown of a pool."""
    machines_per_pool_max: int = 16
    """Assumed to be available where no quota says less."""
    on_demand_min: int = 0
    """At least this many instances are on demand, where available."""
    boot_failures_max: int = 3
    """This many instances in a row without an agent stop their pool; three times as many, of any
    pools, stop all. Before any pool has brought up an agent, this many stop all. At most this
    many of a pool are up until its first agent registers."""
    idle_s: float = 1800.0
    """Pause a job that was held for this long, so that its instances are given back."""

    @property
    def reserve_s(self) -> float:
        """Seconds at the present cost that a budget keeps for saving the job's state."""
        return self.parting_s + self.look_s


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request without an outcome. It is never sent a second time."""

    ask: InstanceRequest
    usd_per_hour: float
    """Of one instance."""
    since: float
    """When it was sent, or last seen in the provider's queue: it may cost from then on."""
    is_in_doubt: bool = False
    doubted_at: float = 0.0
    """When its answer failed to come, or its zone was last not seen."""
    is_queued: bool = False
    """It waits in the provider's queue, and costs nothing."""
    queued_since: float | None = None
    unwanted_since: float | None = None
    """Since when the target does without it, while it waits."""
    cancelled_at: float | None = None
    """When its withdrawal was last ordered."""

    @property
    def usd_per_hour_all(self) -> float:
        return self.usd_per_hour * self.ask.count

    @property
    def counts_from(self) -> float:
        """When its cost begins to count: what it made costs from its creation, once it is seen."""
        return max(self.since, self.doubted_at) if self.is_in_doubt else self.since


def request_id_of(prefix: str, number: int) -> str:
    """Return the id of a leader's request, a UUID as clouds require: its instances' label."""
    return str(uuid5(_REQUESTS, f"{prefix}-{number}"))


@dataclass(frozen=True, slots=True)
class Cooldown:
    """A pool gets no request before ``until``."""

    until: float
    kind: CooldownKind
    refusals: int
    """Since its last grant; of failed boots, since its last agent."""
    text: str
    since: float
    """When the first of these refusals came."""


@dataclass(frozen=True, slots=True)
class BootRecord:
    """Whether a pool's instances start agents, as far as it was seen."""

    pool: Pool
    has_joined: bool = False
    """An agent of this pool has registered once, with all its GPUs."""
    failures: int = 0
    """Instances without an agent since the last one that registered."""
    text: str = ""
    """What was wrong with the last of them."""


@dataclass(frozen=True, slots=True)
class CapacityRecord:
    """What the next leader must know; stored before a request is sent."""

    _: KW_ONLY
    spent_usd: float = 0.0
    asks: tuple[PendingRequest, ...] = ()
    machines: tuple[RentedInstance, ...] = ()
    """The rented instances; the field keeps the name under which it is stored."""
    stop: StopCause = ""
    stopped_at_usd: float | None = None
    """The total budget that was spent; a larger one lifts the stop."""
    boots: tuple[BootRecord, ...] = ()
    boots_failed: int = 0
    """Instances of all pools without an agent since the last one that registered."""
    retried_at: float = 0.0
    """When an operator last ordered to forget such failures."""
    pace: PaceRecord | None = None
    spent_gpu_us: int = 0
    ended_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CapacityState:
    """Everything that the decisions know; the same events give the same state."""

    policy: CapacityPolicy = field(default_factory=CapacityPolicy)
    now: float = 0.0
    prefix: str = ""
    """Prefix of this leader's request ids, globally unique. Empty: not the leader."""
    requests: int = 0
    prices: Mapping[Pool, float] = field(default_factory=dict)
    quotas: tuple[QuotaUsage, ...] | None = None
    """``None``: not read yet. A provider without quotas reports none."""
    target: Mapping[Pool, int] = field(default_factory=dict)
    is_target_set: bool = False
    """The planner has set a target in this term: until then nothing is surplus."""
    asks: Mapping[str, PendingRequest] = field(default_factory=dict)
    instances: Mapping[str, RentedInstance] = field(default_factory=dict)
    ended_nodes: tuple[str, ...] = ()
    """Names of the nodes whose instances ended last. sailord may still list them for a while; the
    ledger must not book them as nodes that are not rented."""
    deleted: frozenset[str] = frozenset()
    """Instances known to be deleted; an older observation may still list them."""
    cooldowns: Mapping[Pool, Cooldown] = field(default_factory=dict)
    boots: Mapping[Pool, BootRecord] = field(default_factory=dict)
    boots_failed: int = 0
    retried_at: float = 0.0
    """Both as in ``CapacityRecord``."""
    surplus_since: Mapping[Pool, float] = field(default_factory=dict)
    in_use: frozenset[str] = frozenset()
    holding: frozenset[str] = frozenset()
    """Names of the nodes that the job uses, and of those whose memory it may need."""
    looked_at: float = 0.0
    """When agents were last counted."""
    counting_since: float = 0.0
    """Since when they are counted without a gap: an agent that could not be counted is not late."""
    observed_at: float | None = None
    unseen_zones: Mapping[str, float] = field(default_factory=dict)
    """Those that the last observation lacked, and since when."""
    spent_usd: float = 0.0
    spent_gpu_us: int = 0
    """Cost of instances that no longer exist, and the GPU microseconds that they were paid for."""
    stop: StopCause = ""
    options: DeadlineOptions | None = None
    """Of the active job, if it has a deadline and there are instances of both contracts."""
    progress: JobProgress | None = None
    """``None``: no job is active, or it is held."""
    pace: DeadlineState | None = None
    paused: str = ""
    """The job that was paused before its budget is spent."""


# ---- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TookOver:
    """This process became leader and read the last leader's record."""

    at: float
    prefix: str
    books: CapacityRecord


@dataclass(frozen=True, slots=True)
class SteppedDown:
    """This process is no longer the leader."""

    at: float


@dataclass(frozen=True, slots=True)
class Observed:
    """The provider's instances were listed."""

    at: float
    observation: Observation


@dataclass(frozen=True, slots=True)
class RequestAnswered:
    """A request was answered or timed out."""

    at: float
    outcome: RequestOutcome


@dataclass(frozen=True, slots=True)
class DeletionAnswered:
    """A deletion was answered."""

    at: float
    deleted: DeleteResult


@dataclass(frozen=True, slots=True)
class PricesRead:
    """Prices were read."""

    at: float
    prices: Mapping[Pool, float]


@dataclass(frozen=True, slots=True)
class QuotasRead:
    """Quotas were read."""

    at: float
    quotas: tuple[QuotaUsage, ...]


@dataclass(frozen=True, slots=True)
class Agent:
    """What the decisions need to know about a registered agent."""

    gpus: int | None
    """``None``: not known, since its record has gone."""
    is_leaving: bool = False
    is_out: bool = False
    """Its node is quarantined."""


@dataclass(frozen=True, slots=True)
class AgentsCounted:
    """All registered agents by name, and the names of those that the job uses."""

    at: float
    agents: Mapping[str, Agent]
    in_use: frozenset[str] = frozenset()
    holding: frozenset[str] = frozenset()
    """Those whose memory it may need, used or not."""


@dataclass(frozen=True, slots=True)
class TargetSet:
    """The planner set how many instances of each pool there should be."""

    at: float
    target: Mapping[Pool, int]
    options: DeadlineOptions | None = None


@dataclass(frozen=True, slots=True)
class ProgressSeen:
    """How far the active job is; ``None``: none is active, or it is held."""

    at: float
    progress: JobProgress | None


@dataclass(frozen=True, slots=True)
class StockReported:
    """A webhook reported that GPUs of this kind are available in this zone."""

    at: float
    zone: str
    gpu: str


@dataclass(frozen=True, slots=True)
class BootsRetried:
    """An operator has mended what kept instances from bringing up agents."""

    at: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""

    at: float


CapacityEvent = (
    TookOver
    | SteppedDown
    | Observed
    | RequestAnswered
    | DeletionAnswered
    | PricesRead
    | QuotasRead
    | AgentsCounted
    | TargetSet
    | ProgressSeen
    | StockReported
    | BootsRetried
    | Tick
)


# ---- commands ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Create:
    """Store the record, then send this request once."""

    ask: InstanceRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """Withdraw a request that waits in the provider's queue; idempotent."""

    ask: InstanceRequest


@dataclass(frozen=True, slots=True)
class DeleteInstances:
    """Delete instances by their unique numbers; idempotent."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Store the record, then drain this node; its instance is deleted once unused. Idempotent."""

    node: str
    why: str
    leaves_at: float | None = None
    """When the provider ends it, whatever runs on it."""


@dataclass(frozen=True, slots=True)
class PauseJob:
    """Pause the job, so that it saves its state and its instances can be deleted."""

    why: str
    job: str = ""
    """Empty: whichever has the cluster."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell what is rented for a job's deadline, or that it is at risk."""

    job: str
    text: str
    is_at_risk: bool = False


@dataclass(frozen=True, slots=True)
class Log:
    """Log a sentence."""

    text: str


CapacityCommand = Create | Cancel | DeleteInstances | Drain | PauseJob | Tell | Log
CapacityDecision = tuple[CapacityState, tuple[CapacityCommand, ...]]
