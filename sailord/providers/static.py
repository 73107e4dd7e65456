"""Hosts that are simply there: their agents register themselves, and nobody makes or ends them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from sailord.providers.interface import (
    Ask,
    Deleted,
    Instance,
    Notice,
    Observation,
    Outcome,
    Pool,
    Quota,
    Refused,
    no_notices,
)
from simulator.documents.problems import Problem


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of the list."""

    name: str
    """Under which its agent registers."""
    pool: Pool
    usd_per_hour: float | None = None
    """For whoever wants to see what it costs; it is nobody's to delete."""


@dataclass(frozen=True, slots=True)
class StaticProvider:
    """A list of hosts."""

    hosts: tuple[Host, ...]
    now: Callable[[], float]
    since: float
    """From when on their cost is counted: nobody knows when they were bought."""

    @property
    def pools(self) -> Sequence[Pool]:
        return ()

    async def check(self) -> Sequence[Problem]:
        """Nothing can be wrong that its file does not show."""
        return ()

    async def observe(self) -> Observation:
        found = tuple(
            Instance(host.name, host.name, host.pool, "running", self.since, "", host.name)
            for host in self.hosts
        )
        return Observation(self.now(), found)

    async def create(self, ask: Ask) -> Outcome:
        return Refused(ask.request_id, "bad_request", "the list of hosts is all there is")

    async def delete(self, ids: Sequence[str]) -> Deleted:
        return Deleted((), dict.fromkeys(ids, "a host of the list is nobody's to delete"))

    async def prices(self) -> Mapping[Pool, float]:
        return {h.pool: h.usd_per_hour for h in self.hosts if h.usd_per_hour is not None}

    async def quotas(self) -> Sequence[Quota]:
        return ()

    def notices(self) -> AsyncIterator[Notice]:
        return no_notices()

    async def close(self) -> None:
        """Nothing is held."""
