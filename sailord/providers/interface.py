"""The interface of a provider of instances: plain data and one base class.

A provider decides nothing. Ordinary failures of a cloud are results, not exceptions: a refusal has
a kind, a request without an answer is ``InDoubt``, an observation names the zones it lacks.
Exceptions are ``ProviderError`` (nothing could be observed) and, at the start, ``InputError`` for
what the user must fix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from simulator.documents.problems import Problem

InstanceState = Literal["pending", "running", "stopping", "preempted", "gone"]
RefusalKind = Literal["stockout", "quota", "rate", "permission", "bad_request", "unknown"]
NoticeKind = Literal["preemption", "maintenance"]


class ProviderError(Exception):
    """The provider could not be observed: its instances are unknown, not gone."""


@dataclass(frozen=True, slots=True, order=True)
class Pool:
    """Instances of one zone, machine type and contract: the unit of requests and prices."""

    zone: str
    machine: str
    """The provider's name of the machine type."""
    gpu: str
    """The catalogue's name of the GPU."""
    gpus: int
    """Per instance."""
    spot: bool
    flex: bool = False
    """Its requests wait in a queue of the provider until all of their instances can be made, which
    then run for a limited time, and are not preempted."""

    @property
    def is_on_demand(self) -> bool:
        """Whether its instances are made at once or not at all, and are not preempted."""
        return not self.spot and not self.flex

    @property
    def contract(self) -> str:
        if self.flex:
            return "flex start"
        return "spot" if self.spot else "on demand"

    def __str__(self) -> str:
        return f"{self.machine} in {self.zone} ({self.contract})"


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance, from its creation to its deletion."""

    id: str
    """The provider's unique number; unlike a name it is never reused."""
    name: str
    pool: Pool
    state: InstanceState
    """``preempted``: stopped by the provider; its disk and its name still exist."""
    created_at: float
    """Unix time; it is billed from here on."""
    request_id: str
    """Of the request that made it, read from its label; empty: not made by a request."""
    node: str = ""
    """The name that its agent registers under; empty while unknown."""
    boot: str = ""
    """The boot that is running, where the provider knows it."""
    ends_at: float | None = None
    """When the provider deletes it by itself; ``None``: never, or unknown."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """The provider preempted an instance; it may be reported more than once."""

    instance: str
    at: float


@dataclass(frozen=True, slots=True)
class Observation:
    """A list of all instances with this cluster's label."""

    at: float
    """When the listing began: later instances may be missing."""
    instances: tuple[Instance, ...]
    unseen_zones: tuple[str, ...] = ()
    """Zones that did not answer: their instances are unknown, not gone."""
    preemptions: tuple[Preemption, ...] = ()
    pending_requests: frozenset[str] = frozenset()
    """Requests whose operation still runs: more of their instances may appear."""
    queued: Mapping[str, InstanceRequest] = field(default_factory=dict)
    """By id, the requests that wait in the provider's queue, at no cost."""
    unseen_queues: tuple[str, ...] = ()
    """Zones where it is not known which requests wait."""
    refused: tuple[Refused, ...] = ()
    """Requests that left the queue, and made nothing; each may be reported many times."""
    ended_at: Mapping[str, float] = field(default_factory=dict)
    """By id, when billing ended, since an instance went off or was deleted, where the provider
    reports it."""


@dataclass(frozen=True, slots=True)
class InstanceRequest:
    """A request for instances. Repeated with the same id it must never make more of them.

    Spot instances get the longest preemption notice that the provider offers.
    """

    request_id: str
    pool: Pool
    count: int


@dataclass(frozen=True, slots=True)
class Granted:
    """These were made or are being made; possibly fewer than requested."""

    request_id: str
    instances: tuple[Instance, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was made."""

    request_id: str
    kind: RefusalKind
    text: str
    retry_after_s: float | None = None
    """When to retry, where the provider says so."""


@dataclass(frozen=True, slots=True)
class InDoubt:
    """No answer in time: instances may have been made; an observation settles it."""

    request_id: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Queued:
    """It waits in the provider's queue, maybe for hours, and costs nothing until it is granted."""

    request_id: str


RequestOutcome = Granted | Refused | InDoubt | Queued


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """The result of a deletion."""

    ids: tuple[str, ...]
    """Deleted, being deleted, or already gone."""
    failed: Mapping[str, str]
    """By id, why it could not be deleted; the caller retries."""


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """A limit on GPUs of one kind in some zones, and its usage."""

    name: str
    """The provider's name of the quota."""
    pools: tuple[Pool, ...]
    """The pools that share it."""
    limit_gpus: float | None
    """``None``: unknown, so that what exceeds it shows as a refusal."""
    used_gpus: float
    why_unknown: str = ""

    @property
    def free_gpus(self) -> float | None:
        return None if self.limit_gpus is None else max(self.limit_gpus - self.used_gpus, 0.0)


@dataclass(frozen=True, slots=True)
class Notice:
    """The provider announces that an instance will end; same as the agent's own notice."""

    at: float
    instance: str
    """Its unique number."""
    node: str
    kind: NoticeKind
    seconds: float
    """Time from ``at`` until it ends."""


class Provider(ABC):
    """A source of instances. Every call has its own timeout, and none blocks the event loop."""

    @property
    def pools(self) -> Sequence[Pool]:
        """All pools that may be requested; none where nodes join by themselves."""
        return ()

    async def check(self) -> Sequence[Problem]:
        """Raise ``InputError`` for what makes renting impossible; return lesser problems."""
        return ()

    @abstractmethod
    async def observe(self) -> Observation:
        """List all instances of this cluster."""

    @abstractmethod
    async def create(self, ask: InstanceRequest) -> RequestOutcome:
        """Make instances; idempotent by the request id."""

    async def cancel(self, ask: InstanceRequest) -> str:
        """Withdraw a request that waits; idempotent. Return why that failed; empty: it did not."""
        return f"requests of {ask.pool} do not wait"

    @abstractmethod
    async def delete(self, ids: Sequence[str]) -> DeleteResult:
        """Delete instances by their unique numbers, with their disks."""

    @abstractmethod
    async def prices(self) -> Mapping[Pool, float]:
        """Return dollars an hour per instance; a pool without a price is never requested."""

    async def quotas(self) -> Sequence[QuotaUsage]:
        """Return the quotas now, those of unknown limit among them."""
        return ()

    async def notices(self) -> AsyncIterator[Notice]:
        """Yield notices as they arrive; ends at once if the provider sends none."""
        nothing: tuple[Notice, ...] = ()
        for notice in nothing:
            yield notice

    async def close(self) -> None:  # noqa: B027 - most providers have nothing to close
        """Close connections and threads."""
