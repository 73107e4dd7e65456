"""What is known of rented machines, what happens to them and what is ordered: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID, uuid5

from sailord.planning.mix import Mix
from sailord.providers.interface import (
    Ask,
    Deleted,
    Instance,
    Observation,
    Outcome,
    Pool,
    Quota,
    RefusalKind,
)

Stop = Literal["", "parting", "ended"]
"""Of a total budget: machines may save what they have; nothing may cost any more."""
_REQUESTS = UUID("0b6b6d0e-6a55-4e0b-9f1e-8f0d3c1f7a52")


@dataclass(frozen=True, slots=True)
class Policy:
    """How much may be spent, and how long is waited for what."""

    usd_per_hour_max: float | None = None
    usd_max: float | None = None
    parting_s: float = 180.0
    """So long before a total budget is spent the work stops: half of it is for saving, the rest
    for deletions that have to be repeated."""
    look_s: float = 10.0
    """How often the provider is looked at: the interval of decisions about money."""
    boot_s: float = 600.0
    """For a running machine until its agent registers."""
    lost_s: float = 60.0
    """A machine whose agent was away for so long is dead, whatever the provider says."""
    doubt_s: float = 120.0
    """After so long an ask whose fate is unknown, and of which nothing is seen, came to nothing."""
    surplus_s: float = 300.0
    """A machine is deleted once it was more than wanted for so long."""
    delete_again_s: float = 30.0
    stockout_s: float = 60.0
    quota_s: float = 300.0
    rate_s: float = 10.0
    permission_s: float = 600.0
    bad_request_s: float = 1800.0
    unknown_s: float = 60.0
    """The first rest of a pool after each kind of refusal; each further one doubles it."""
    rest_max_s: float = 3600.0
    machines_per_ask_max: int = 16
    machines_per_pool_max: int = 16
    """What is taken to be obtainable where no quota says less."""
    on_demand_min: int = 0
    on_demand_share_min: float = field(default=0.0, metadata={"most": 1.0})
    on_demand_after_s: float | None = None

    @property
    def mix(self) -> Mix:
        """How Spot and on demand are mixed."""
        return Mix(self.on_demand_min, self.on_demand_share_min, self.on_demand_after_s)

    def rest_s(self, kind: RefusalKind) -> float:
        """How long a pool rests after its first refusal of a kind."""
        match kind:
            case "stockout":
                return self.stockout_s
            case "quota":
                return self.quota_s
            case "rate":
                return self.rate_s
            case "permission":
                return self.permission_s
            case "bad_request":
                return self.bad_request_s
            case "unknown":
                return self.unknown_s


@dataclass(frozen=True, slots=True)
class Machine:
    """One instance and what we know beyond the provider's word."""

    instance: Instance
    usd_per_hour: float | None
    """``None``: nobody knows its price."""
    priced_from: float
    """Since when it costs that; what it cost before is in ``paid_usd``."""
    known_since: float
    paid_usd: float = 0.0
    was_seen: bool = False
    """By a look, not only granted: from then on a look without it means that it is gone."""
    running_since: float | None = None
    joined_at: float | None = None
    """Its agent registered then."""
    absent_since: float | None = None
    """Its agent is not registered since then, after it was."""
    is_leaving: bool = False
    is_drained: bool = False
    """The job was asked to move off it."""
    gpus: int | None = None
    """As its agent counts them."""
    ended_at: float | None = None
    """It costs nothing since then."""
    is_missed: bool = False
    """The last look did not show it, and nobody has told yet when it ended: at that look, until
    the next one."""
    deletion_at: float | None = None
    """Its deletion was ordered then, the last time."""
    deletions: int = 0
    """How often it was ordered."""
    why: str = ""
    """Why it is to go."""

    def usd(self, now: float) -> float:
        """What it has cost."""
        end = now if self.ended_at is None else min(self.ended_at, now)
        hours = max(end - self.priced_from, 0.0) / 3600
        return self.paid_usd + (self.usd_per_hour or 0.0) * hours

    @property
    def is_live(self) -> bool:
        """Whether it can be counted on."""
        is_up = self.instance.state in ("pending", "running") and self.ended_at is None
        is_well = not (self.is_leaving or self.is_drained) and self.absent_since is None
        return is_up and is_well and not self.why


@dataclass(frozen=True, slots=True)
class Outstanding:
    """An ask whose outcome is not known yet. It is never sent a second time."""

    ask: Ask
    usd_per_hour: float
    """Of one machine."""
    since: float
    is_in_doubt: bool = False

    @property
    def usd_per_hour_all(self) -> float:
        return self.usd_per_hour * self.ask.count


def request_id_of(prefix: str, number: int) -> str:
    """Give the id of a leader's ask: a UUID, as clouds want it.

    So it stands as it is on all that is made for it, and whoever leads next knows that again.
    """
    return str(uuid5(_REQUESTS, f"{prefix}-{number}"))


@dataclass(frozen=True, slots=True)
class Rest:
    """A pool is not asked again before a moment."""

    until: float
    kind: RefusalKind
    refusals: int
    """Since something was last had there."""
    text: str
    since: float
    """When the first of them came."""


@dataclass(frozen=True, slots=True)
class Books:
    """What the next leader must know: stored before anything is asked for."""

    spent_usd: float = 0.0
    asks: tuple[Outstanding, ...] = ()
    machines: tuple[Machine, ...] = ()
    stop: Stop = ""
    stopped_at_usd: float | None = None
    """The total budget that was spent; a larger one lets it go on."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Everything known; the same events give the same."""

    policy: Policy = field(default_factory=Policy)
    now: float = 0.0
    prefix: str = ""
    """Of our requests: two leaders never have the same. Empty: we do not lead."""
    requests: int = 0
    prices: Mapping[Pool, float] = field(default_factory=dict)
    quotas: tuple[Quota, ...] | None = None
    """``None``: not read yet. A provider without limits says that it has none."""
    target: Mapping[Pool, int] = field(default_factory=dict)
    asks: Mapping[str, Outstanding] = field(default_factory=dict)
    machines: Mapping[str, Machine] = field(default_factory=dict)
    deleted: frozenset[str] = frozenset()
    """Machines whose account is closed for good: an older list or answer may still have them."""
    rests: Mapping[Pool, Rest] = field(default_factory=dict)
    surplus_since: Mapping[Pool, float] = field(default_factory=dict)
    in_use: frozenset[str] = frozenset()
    """Names of nodes that the job stands on."""
    looked_at: float = 0.0
    """When agents were last counted."""
    observed_at: float | None = None
    spent_usd: float = 0.0
    """By machines that are gone."""
    stop: Stop = ""


# ---- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TookOver:
    """We lead, and read what the last leader wrote."""

    at: float
    prefix: str
    books: Books


@dataclass(frozen=True, slots=True)
class SteppedDown:
    """Somebody else leads."""

    at: float


@dataclass(frozen=True, slots=True)
class Observed:
    """The provider was looked at."""

    at: float
    observation: Observation


@dataclass(frozen=True, slots=True)
class Answered:
    """An ask was answered, or its deadline passed."""

    at: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class DeletionAnswered:
    """An order to delete was answered."""

    at: float
    deleted: Deleted


@dataclass(frozen=True, slots=True)
class Priced:
    """Prices as they are now."""

    at: float
    prices: Mapping[Pool, float]


@dataclass(frozen=True, slots=True)
class QuotasRead:
    """Quotas as they are now."""

    at: float
    quotas: tuple[Quota, ...]


@dataclass(frozen=True, slots=True)
class Agent:
    """A registered agent, as far as it matters here."""

    gpus: int
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class AgentsCounted:
    """All agents that are registered, by their names, and those that the job stands on."""

    at: float
    agents: Mapping[str, Agent]
    in_use: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Targeted:
    """The planner chose how many machines of each pool there should be."""

    at: float
    target: Mapping[Pool, int]


@dataclass(frozen=True, slots=True)
class Passed:
    """Time has passed."""

    at: float


Event = (
    TookOver
    | SteppedDown
    | Observed
    | Answered
    | DeletionAnswered
    | Priced
    | QuotasRead
    | AgentsCounted
    | Targeted
    | Passed
)


# ---- commands ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Create:
    """Write the books, then send this ask, once."""

    ask: Ask


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete machines by their unique numbers; harmless if repeated."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Write the books, then let the job move off this node: the machine is to go once it is unused.

    Repeated, it is the same order.
    """

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class StopWork:
    """Have the job save itself and give its machines back."""

    why: str


@dataclass(frozen=True, slots=True)
class Say:
    """A sentence for the log."""

    text: str


Command = Create | Delete | Drain | StopWork | Say
