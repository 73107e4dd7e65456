"""What a provider of machines can be asked, and what it answers: plain data and one protocol.

A provider never decides. Whatever can go wrong in the ordinary course of a cloud is an answer
here, not an exception: a refusal has a kind, an answer that never came is ``InDoubt``, and a look
that saw only some zones says which it did not see. What raises is ``ProviderError`` (nothing could
be seen at all) and, at the start, ``InputError`` for what a person has to put right.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from simulator.documents.problems import Problem

Standing = Literal["pending", "running", "stopping", "preempted", "gone"]
RefusalKind = Literal["stockout", "quota", "rate", "permission", "bad_request", "unknown"]
NoticeKind = Literal["preemption", "maintenance"]


class ProviderError(Exception):
    """Nothing could be seen: the machines are unknown, not gone."""


@dataclass(frozen=True, slots=True, order=True)
class Pool:
    """Machines that are alike: what is asked for, counted, priced and cooled down."""

    zone: str
    machine: str
    """The provider's name of the machine type."""
    gpu: str
    """The catalogue's name of the GPU."""
    gpus: int
    """Of one machine."""
    spot: bool

    def __str__(self) -> str:
        return f"{self.machine} in {self.zone} ({'spot' if self.spot else 'on demand'})"


@dataclass(frozen=True, slots=True)
class Instance:
    """One machine, from its creation until it is deleted."""

    id: str
    """The provider's unique number: a name may come back with another machine, this never does."""
    name: str
    pool: Pool
    state: Standing
    """``preempted`` was taken and still stands there, its disk and its name with it."""
    created_at: float
    """Unix time; it costs money from here on."""
    request_id: str
    """Of the ask that it was made for, read back from its label; empty: not made by an ask."""
    node: str = ""
    """The name that its agent registers under; empty while unknown."""
    boot: str = ""
    """The boot that is running, where the provider knows it."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """The provider says that it took a machine; told once or often, it means the same."""

    instance: str
    at: float


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at everything that carries this cluster's label."""

    at: float
    """When the look began: what was made later may be missing from it."""
    instances: tuple[Instance, ...]
    unseen_zones: tuple[str, ...] = ()
    """Zones that did not answer: their instances are unknown, not gone."""
    preemptions: tuple[Preemption, ...] = ()
    pending_requests: frozenset[str] = frozenset()
    """Requests whose operation still runs: their instances may yet appear."""
    ended_at: Mapping[str, float] = field(default_factory=dict)
    """By id, when a deletion took effect, as far as the provider's operations tell: from then on
    a machine costs nothing, and without it whoever keeps the books assumes the next look."""


@dataclass(frozen=True, slots=True)
class Ask:
    """An order for machines. The same request id, sent again, must never make more of them.

    Spot machines get the longest warning before a preemption that the provider gives.
    """

    request_id: str
    pool: Pool
    count: int


@dataclass(frozen=True, slots=True)
class Granted:
    """These were made, or are being made. It may be fewer than were asked for."""

    request_id: str
    instances: tuple[Instance, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was made, and why."""

    request_id: str
    kind: RefusalKind
    text: str
    retry_after_s: float | None = None
    """The provider's own word on when to ask again, from now."""


@dataclass(frozen=True, slots=True)
class InDoubt:
    """No answer came in time: it may have been made. Looking settles it, asking anew does not."""

    request_id: str
    text: str = ""


Outcome = Granted | Refused | InDoubt


@dataclass(frozen=True, slots=True)
class Deleted:
    """What became of an order to delete."""

    ids: tuple[str, ...]
    """Deleted, being deleted, or not there any more."""
    failed: Mapping[str, str]
    """By id, why it could not be deleted; it is tried again."""


@dataclass(frozen=True, slots=True)
class Quota:
    """How many GPUs of one kind may still be had in some zones, by one limit."""

    name: str
    """As the provider calls it, for people."""
    pools: tuple[Pool, ...]
    """The pools that draw on it, together."""
    limit_gpus: float
    used_gpus: float

    @property
    def free_gpus(self) -> float:
        return max(self.limit_gpus - self.used_gpus, 0.0)


@dataclass(frozen=True, slots=True)
class Notice:
    """The provider warns that a machine will go. The agent's own warning means the same."""

    at: float
    instance: str
    """The machine's unique number."""
    node: str
    kind: NoticeKind
    seconds: float
    """How long it will still run from ``at`` on."""


class Provider(Protocol):
    """Where machines come from.

    Every call has a deadline of its own and none blocks the loop.
    """

    @property
    def pools(self) -> Sequence[Pool]:
        """All pools that may be asked of it; none where machines come by themselves."""

    async def check(self) -> Sequence[Problem]:
        """Raise ``InputError`` for what a person has to put right before anything can be had.

        What is returned is amiss, too, but keeps nobody from renting.
        """

    async def observe(self) -> Observation:
        """Look at everything that is ours."""

    async def create(self, ask: Ask) -> Outcome:
        """Make machines; called once, or again with the same request id."""

    async def delete(self, ids: Sequence[str]) -> Deleted:
        """Remove machines by their unique numbers, disks included."""

    async def prices(self) -> Mapping[Pool, float]:
        """Dollars an hour for one machine; a pool without a price is absent and never asked for."""

    async def quotas(self) -> Sequence[Quota]:
        """The limits as they stand now; a pool that no limit names has none."""

    def notices(self) -> AsyncIterator[Notice]:
        """Warnings as they come; an iterator that ends at once where there are none."""

    async def close(self) -> None:
        """Let go of connections and threads."""


async def no_notices() -> AsyncIterator[Notice]:
    """Of a provider that never warns."""
    nothing: tuple[Notice, ...] = ()
    for notice in nothing:
        yield notice
