"""A provider of listed hosts: their agents register themselves; none is made or deleted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sailord.providers.interface import (
    DeleteResult,
    Instance,
    InstanceRequest,
    Observation,
    Pool,
    Provider,
    Refused,
    RequestOutcome,
)


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the list."""

    name: str
    """Name under which its agent registers."""
    pool: Pool
    usd_per_hour: float | None = None
    """Only for the cost report."""


@dataclass(frozen=True, slots=True)
class StaticProvider(Provider):
    """A list of hosts."""

    hosts: tuple[Host, ...]
    now: Callable[[], float]
    since: float
    """Start of the cost count."""

    async def observe(self) -> Observation:
        found = tuple(
            Instance(host.name, host.name, host.pool, "running", self.since, "", host.name)
            for host in self.hosts
        )
        return Observation(self.now(), found)

    async def create(self, ask: InstanceRequest) -> RequestOutcome:
        return Refused(
            ask.request_id, "bad_request", "the static provider has only the listed hosts"
        )

    async def delete(self, ids: Sequence[str]) -> DeleteResult:
        return DeleteResult((), dict.fromkeys(ids, "a listed host is never deleted"))

    async def prices(self) -> Mapping[Pool, float]:
        return {h.pool: h.usd_per_hour for h in self.hosts if h.usd_per_hour is not None}
