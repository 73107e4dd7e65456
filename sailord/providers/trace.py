"""A provider that replays a trace of availability.

Another provider makes the instances; the trace limits how many it has at each moment. Beyond that
the youngest are preempted, and requests end in a stockout.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sailord.providers.interface import (
    DeleteResult,
    InstanceRequest,
    Notice,
    Observation,
    Pool,
    Preemption,
    Provider,
    QuotaUsage,
    Refused,
    RequestOutcome,
)
from simulator.documents.problems import Problem
from simulator.traces.trace import Trace


@dataclass(eq=False)
class TraceProvider(Provider):
    """Another provider, limited to the counts of a trace."""

    within: Provider
    trace: Trace
    columns: tuple[Pool, ...]
    """The pool of each column of the trace."""
    now: Callable[[], float]
    since: float
    """When the replay began."""
    speed: float = 1.0
    """Seconds of the trace per second; after its end the last counts stay."""
    _taken: dict[str, float] = field(default_factory=dict)

    @property
    def pools(self) -> Sequence[Pool]:
        return self.within.pools

    def stock(self, pool: Pool) -> int:
        """Return how many instances of a pool the trace allows now."""
        at = (self.now() - self.since) * self.speed
        here = [i for i in self.trace.intervals if i.start_s <= at] or self.trace.intervals[:1]
        columns = zip(self.columns, here[-1].gpus, strict=True)
        return sum(gpus // pool.gpus for column, gpus in columns if column == pool)

    async def check(self) -> Sequence[Problem]:
        return await self.within.check()

    async def observe(self) -> Observation:
        seen = await self.within.observe()
        oldest = sorted(seen.instances, key=lambda i: i.created_at)
        excess: list[str] = []
        for pool in self.pools:
            excess += [i.id for i in oldest if i.pool == pool][self.stock(pool) :]
        if excess:
            await self.within.delete(excess)
            self._taken |= dict.fromkeys(excess, self.now())
        left = tuple(i for i in seen.instances if i.id not in self._taken)
        taken = tuple(Preemption(id_, at) for id_, at in self._taken.items())
        ended = {**seen.ended_at, **self._taken}
        return replace(seen, instances=left, preemptions=taken, ended_at=ended)

    async def create(self, ask: InstanceRequest) -> RequestOutcome:
        seen = await self.within.observe()
        if any(i.request_id == ask.request_id for i in seen.instances):
            return await self.within.create(ask)
        room = self.stock(ask.pool) - sum(i.pool == ask.pool for i in seen.instances)
        if room <= 0:
            return Refused(ask.request_id, "stockout", "the trace has no more now")
        return await self.within.create(replace(ask, count=min(ask.count, room)))

    async def delete(self, ids: Sequence[str]) -> DeleteResult:
        return await self.within.delete(ids)

    async def prices(self) -> Mapping[Pool, float]:
        return await self.within.prices()

    async def quotas(self) -> Sequence[QuotaUsage]:
        return await self.within.quotas()

    def notices(self) -> AsyncIterator[Notice]:
        return self.within.notices()

    async def close(self) -> None:
        await self.within.close()
