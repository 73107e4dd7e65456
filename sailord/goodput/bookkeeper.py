"""Keeps the ledger of the cluster while this sailord is the leader, and stores it for the next."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from agents.daemon.tasks import is_set_within
from agents.protocol.codec import WireError, decode, encode
from agents.protocol.records import NodeRecord
from agents.store.interface import Delete, Operation, Put, StoreError
from sailord.capacity.core.model import CapacityState
from sailord.cluster_records import Gateway
from sailord.core.model.state import State
from sailord.goodput.core.last_hour import LastHour
from sailord.goodput.core.ledger import Ledger, fold, gpus_of
from sailord.goodput.core.shares import Share, ShareKey, Shares, divided, resumed, too_many
from sailord.goodput.core.usage_sample import (
    PriceOf,
    Renting,
    newest_lives,
    renting_of,
    sample_usage,
    with_other_jobs,
)
from simulator.cluster.cluster import Cluster

LOOK_S = 0.25
"""Least seconds between two looks while the phase stays the same."""
LOOK_S_PER_NODE = 0.0001
"""Least seconds between two looks per node, so that looking takes about 1 % of the time."""
SAVE_S, SAVE_S_MIN = 10.0, 1.0
"""How often the ledger is stored, and how soon after nodes joined or were lost. If a leader dies,
the next one books the time since then on the stored sample."""
SHUTDOWN_S = 1.0


def prices_of(cluster: Cluster) -> PriceOf:
    """Return the prices of nodes by the cluster file, or its catalogue."""
    exact = {(p.gpu, p.machine, p.zone, p.spot): p.price_usd_per_gpu_hour for p in cluster.pools}
    alike = {(p.gpu, p.zone, p.spot): p.price_usd_per_gpu_hour for p in cluster.pools}

    def price(node: NodeRecord) -> float | None:
        key = (node.gpu, node.machine, node.zone, node.spot)
        each = exact.get(key, alike.get((node.gpu, node.zone, node.spot)))
        return None if each is None else each * node.gpus

    return price


@dataclass(eq=False)
class Bookkeeper:
    """Folds each decision's state into the ledger."""

    gateway: Gateway
    price: PriceOf
    _: KW_ONLY
    capacity: Callable[[], CapacityState | None] = lambda: None
    """The rented instances; none: no provider is configured."""
    parts: Callable[[], Sequence[State]] = tuple
    """The parts of jobs that share the cluster, the first one first; none: there is one job."""
    ledger: Ledger = field(default_factory=Ledger)
    stored: Ledger = field(default_factory=Ledger)
    """As last stored. Metrics show this one: what a leader booked after it is lost if the leader
    dies, and no counter may go back."""
    shares: Shares = field(default_factory=dict)
    """The ledger by day and by job."""
    stored_shares: Shares = field(default_factory=dict)
    """The same as last stored."""
    last_hour: LastHour = field(default_factory=LastHour)
    _phase: object = None
    _looked_at: float = 0.0
    _loaded_for: int | None = None
    """The term for which the last leader's ledger was read."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    """The number of paid GPUs changed, so the ledger is stored soon, for the next leader."""

    def observe(self, state: State) -> None:
        """Book the time since the last look, if one is due or the phase has changed."""
        if state.term is None or state.term != self._loaded_for:
            return
        capacity = self.capacity()
        if capacity is not None and not _is_known(capacity):
            return
        parts = self.parts() or (state,)
        # The one whose steps are split by what its ranks measure.
        main = next((part for part in parts if part.active is not None), parts[0])
        phase = tuple(map(_phase_of, parts))
        pause_s = max(LOOK_S, len(state.nodes) * LOOK_S_PER_NODE)
        if phase == self._phase and state.now < self._looked_at + pause_s:
            return
        self._phase, self._looked_at = phase, state.now
        step, lives = self.ledger.step, newest_lives(state)
        sample = sample_usage(
            main,
            self.price,
            Renting() if capacity is None else renting_of(capacity, state.now),
            trained=None if step is None else (step.job, step.generation),
            lives=lives,
        )
        beside = (part for part in parts if part is not main)
        others = [sample_usage(part, self.price, Renting(), lives=lives) for part in beside]
        sample = with_other_jobs(sample, others) if others else sample
        old, self.ledger = self.ledger, fold(self.ledger, sample)
        self.shares = divided(self.shares, old, self.ledger)
        self.last_hour.note(self.ledger)
        if gpus_of(old) != gpus_of(self.ledger):
            self._changed.set()

    async def load(self, term: int) -> None:
        """Read the last leader's ledger, to go on with it in our term.

        Raises what the store raises.
        """
        key = self.gateway.keys.goodput
        entry = await self.gateway.store.get(key)
        try:
            stored = Ledger() if entry is None else decode(Ledger, entry.value)
        except WireError as error:
            self.gateway.unreadable.note(key, str(error))
            stored = Ledger()
        self.ledger = self.stored = stored
        self.shares = self.stored_shares = resumed(await self._read_shares(), stored)
        self._phase, self._loaded_for = None, term
        self.last_hour.clear()

    async def save(self, term: int) -> None:
        """Store the ledger as leader of the term; never replace an unreadable one."""
        key = self.gateway.keys.goodput
        if term == self._loaded_for and key not in self.gateway.unreadable.found:
            surplus = too_many(self.shares)
            self.shares = {k: each for k, each in self.shares.items() if k not in surplus}
            ledger, shares = self.ledger, self.shares
            stored = self.stored_shares
            operations: list[Operation] = [Put(key, encode(ledger))]
            for k, each in shares.items():
                if stored.get(k) != each and self._key(k) not in self.gateway.unreadable.found:
                    operations.append(Put(self._key(k), encode(each)))
            operations += [Delete(self._key(k)) for k in stored.keys() - shares.keys()]
            if await self.gateway.write_as_leader(term, operations):
                self.stored, self.stored_shares = ledger, shares

    def _key(self, share: ShareKey) -> str:
        return f"{self.gateway.keys.goodput_shares}{'/'.join(share)}"

    async def _read_shares(self) -> list[Share]:
        """Read the stored shares; one that cannot be read stays, and counts as none."""
        prefix = self.gateway.keys.goodput_shares
        found, faults = [], {}
        for entry in (await self.gateway.store.snapshot(prefix)).entries:
            try:
                found.append(decode(Share, entry.value))
            except WireError as error:
                faults[entry.key] = str(error)
        self.gateway.unreadable.note_all(faults, prefixes=[prefix])
        return found

    async def save_often(self, term: Callable[[], int | None]) -> None:
        """Store it from time to time while this sailord is the leader."""
        while True:
            await asyncio.sleep(SAVE_S_MIN)
            await is_set_within(self._changed, SAVE_S - SAVE_S_MIN)
            self._changed.clear()
            await self.save_now(term())

    async def save_now(self, term: int | None) -> None:
        """Store it now if the store answers; else ``save_often`` tries again."""
        if term is not None:
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(SHUTDOWN_S):
                    await self.save(term)


def _is_known(capacity: CapacityState) -> bool:
    """Whether all rented instances are known: a new leader finds what the last one had requested
    only in its first observation."""
    return bool(capacity.prefix) and (capacity.observed_at is not None or not capacity.asks)


def _phase_of(state: State) -> object:
    """Return a value that changes whenever the job's nodes may change their cause."""
    active = state.active
    if active is None:
        return None
    generation = active.generation
    known = None if generation is None else (generation.number, generation.state)
    return active.job, type(active.phase), known, active.question is None
