"""The agent's part in the store: its node under a lease, its intents, and what it reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from agents.core.model import Event, GenerationRead, JobEnded, LeaseEnded, Registered, StoreFailed
from agents.daemon.clock import Clock
from agents.protocol.codec import WireError, decode, encode
from agents.protocol.compression import unpack
from agents.protocol.records import (
    ENDED,
    LIVE,
    Durable,
    GenerationRecord,
    Intent,
    JobId,
    JobRecord,
    NodeId,
    NodeRecord,
)
from agents.protocol.store_keys import Keys
from agents.store import Compacted, Entry, LeaseGone, Put, Store, StoreError
from agents.workers.specs import Briefing

T = TypeVar("T")

RETRY_S = 0.3
LOOK_S_MAX = 2.5
"""However long the lease: who leads, and where, changes without a word."""
KNOWN_S = 600.0
"""So long a node is remembered that the store does not show any more."""


@dataclass(eq=False)
class Registration:
    """One node's place in the store."""

    store: Store
    keys: Keys
    lease_s: float
    clock: Clock
    feed: Callable[[Event], None]
    kept: Callable[[], set[JobId]] = set
    """The jobs of which snapshots stand here."""
    leader: str | None = None
    """Where the leader listens, as the store said last."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    known: dict[NodeId, NodeRecord] = field(default_factory=dict)
    """All nodes that were seen of late, as they were seen last."""
    jobs: dict[JobId, JobRecord] = field(default_factory=dict)
    """All jobs, as they were seen last."""
    _seen_at: dict[NodeId, float] = field(default_factory=dict)
    _wished: NodeRecord | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _lease: int = 0
    _read: dict[str, tuple[int, object]] = field(default_factory=dict)
    """Records of jobs by key, as they were read at a revision."""
    _intents: asyncio.Queue[Intent] = field(default_factory=asyncio.Queue)

    # ---- the node -------------------------------------------------------------------------------

    def register(self, node: NodeRecord) -> None:
        """Have the node stand in the store like this; the newest wish is the one that counts."""
        self._wished = node
        self._changed.set()

    async def stay(self) -> None:
        """Keep the lease, and write the node whenever it changes; for ever."""
        while True:
            self._changed.clear()
            try:
                await self._put_node()
            except StoreError:
                self.feed(StoreFailed(self.clock.now()))
                await asyncio.sleep(RETRY_S)
                continue
            pause_s = self.lease_s / 4
            while not self._changed.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), pause_s)
                    break
                is_heard = await self._renew()
                pause_s = self.lease_s / 4 if is_heard else RETRY_S

    async def _put_node(self) -> None:
        node = self._wished
        if node is None:
            return
        if not self._lease:
            self._lease = (await self.store.grant(self.lease_s)).id
        key = self.keys.node(node.id)
        try:
            await self.store.transact([], [Put(key, encode(node), self._lease)])
        except LeaseGone:
            self._lease = 0
            raise
        self.feed(Registered(self.clock.now(), node))

    async def _renew(self) -> bool:
        """Keep the lease; whether the store answered."""
        if not self._lease:
            return True
        try:
            if not await self.store.keep(self._lease):
                self._lease = 0
                self.feed(LeaseEnded(self.clock.now()))
        except StoreError:
            self.feed(StoreFailed(self.clock.now()))
            return False
        return True

    async def leave(self) -> None:
        """Take the node out of the store."""
        if self._lease:
            with contextlib.suppress(StoreError):
                await self.store.revoke(self._lease)

    def raise_intent(self, intent: Intent) -> None:
        """Have a notice stand in the store, after those that were raised before it."""
        self._intents.put_nowait(intent)

    async def raise_all(self) -> None:
        """Store each notice until it stands there, as its id makes it one whatever happens.

        One after the other: a withdrawal that came before its notice would count for nothing.
        """
        while True:
            intent = await self._intents.get()
            while not await self._put_intent(intent):
                await asyncio.sleep(RETRY_S)

    async def _put_intent(self, intent: Intent) -> bool:
        with contextlib.suppress(StoreError):
            await self.store.transact([], [Put(self.keys.intent(intent.id), encode(intent))])
            return True
        return False

    # ---- what the store says --------------------------------------------------------------------

    async def look(self, node: NodeId, held: Callable[[], JobId | None]) -> None:
        """Read the generation, at once after a change and now and then without one; for ever."""
        while True:
            self.woken.clear()
            try:
                await self._look(node, held())
            except StoreError:
                self.feed(StoreFailed(self.clock.now()))
                await asyncio.sleep(RETRY_S)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.woken.wait(), min(self.lease_s / 4, LOOK_S_MAX))

    async def _look(self, node: NodeId, held: JobId | None) -> None:
        entry = await self.store.get(self.keys.leader)
        self.leader = None if entry is None else _address(entry.value)
        found = (await self.store.snapshot(self.keys.jobs)).entries
        self.jobs = {job.id: job for job in self._read_all(JobRecord, "state", found)}
        records = self._read_all(GenerationRecord, "gen", found)
        record = choose(records, self.jobs, node, held)
        durable = None
        if record is not None:
            of_job = [e for e in found if e.key == self.keys.durable(record.job)]
            durable = next(
                (each.point for each in self._read_all(Durable, "durable", of_job)), None
            )
        now = self.clock.now()
        self.feed(GenerationRead(now, record, durable))
        for id_ in sorted(self.kept() & self.jobs.keys()):
            if self.jobs[id_].state in ENDED:
                self.feed(JobEnded(now, id_))

    def _read_all(self, kind: type[T], part: str, entries: Iterable[Entry]) -> list[T]:
        """The records under this part of a job's keys; what nobody can read is passed over."""
        found = []
        for entry in entries:
            if entry.key.endswith(f"/{part}"):
                modified, record = self._read.get(entry.key, (0, None))
                if modified != entry.modified:
                    # Members are many, and what did not change need not be read again.
                    record = None
                    with contextlib.suppress(WireError):
                        record = decode(kind, unpack(entry.value))
                    self._read[entry.key] = entry.modified, record
                if isinstance(record, kind):
                    found.append(record)
        return found

    async def watch(self) -> None:
        """A change wakes the looking, and means nothing else; for ever."""
        while True:
            with contextlib.suppress(StoreError):
                after = (await self.store.snapshot(self.keys.leader)).revision
                for_jobs = self.store.watch(self.keys.jobs, after=after)
                async with contextlib.aclosing(for_jobs) as changes:
                    async for change in changes:
                        self.woken.set()
                        if isinstance(change, Compacted):
                            break
            await asyncio.sleep(RETRY_S)

    async def brief(self, record: GenerationRecord) -> Briefing | None:
        """Read all that workers must know of a generation; ``None``: it cannot be had now."""
        with contextlib.suppress(StoreError, UnicodeDecodeError, WireError):
            plan, spec, durable, nodes = await asyncio.gather(
                self.store.get(self.keys.plan(record.job, record.plan)),
                self.store.get(self.keys.spec(record.job)),
                self.store.get(self.keys.durable(record.job)),
                self._nodes_known(),
            )
            if plan is None or spec is None:
                return None
            return Briefing(
                record,
                unpack(plan.value).decode(),
                spec.value.decode(),
                nodes,
                None if durable is None else decode(Durable, durable.value),
            )
        return None

    async def nodes(self) -> tuple[NodeRecord, ...]:
        """All nodes that stand in the store, or none if it does not answer."""
        with contextlib.suppress(StoreError):
            found = (await self.store.snapshot(self.keys.nodes)).entries
            nodes = tuple(decode(NodeRecord, entry.value) for entry in found)
            now = self.clock.now()
            self._seen_at.update((node.id, now) for node in nodes)
            self.known.update((node.id, node) for node in nodes)
            for id_ in [id_ for id_, at in self._seen_at.items() if at < now - KNOWN_S]:
                del self._seen_at[id_], self.known[id_]
            return nodes
        return ()

    async def _nodes_known(self) -> tuple[NodeRecord, ...]:
        """Those that stand there, and those that once did: their memory may still answer."""
        present = await self.nodes()
        names = {node.id for node in present}
        return (*present, *(node for id_, node in self.known.items() if id_ not in names))


def choose(
    records: Iterable[GenerationRecord],
    jobs: Mapping[JobId, JobRecord],
    node: NodeId,
    held: JobId | None,
) -> GenerationRecord | None:
    """Which generation concerns the node: its workers' own job's while it has any, else one that
    is open and counts on it, else the last one of who has the cluster.

    A job that is held trains nowhere, and what the node has in memory for it is still needed.
    """
    if held is not None:
        records = [record for record in records if record.job == held]

    def concern(record: GenerationRecord) -> tuple[bool, bool, bool, bool, str]:
        is_open, job = record.state != "closed", jobs.get(record.job)
        return (
            is_open and node in record.members,
            is_open,
            job is not None and job.state in LIVE,
            job is not None and job.state not in ENDED,
            record.job,
        )

    return max(records, key=concern, default=None)


def _address(value: bytes) -> str | None:
    try:
        address = json.loads(value)["address"]
    except (ValueError, KeyError, TypeError):
        return None
    return address if isinstance(address, str) else None
