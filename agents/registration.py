"""The agent's part in the store: its node under a lease, its intents, and what it reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from agents.clock import Clock
from agents.model import Event, GenerationRead, LeaseEnded, Registered, StoreFailed
from agents.protocol import GenerationRecord, Intent, JobId, NodeId, NodeRecord
from agents.store import Compacted, LeaseGone, Put, Store, StoreError
from agents.wire import WireError, decode, encode

LOOK_S = 1.0
RETRY_S = 0.3


@dataclass(eq=False)
class Registration:
    """One node's place in the store."""

    store: Store
    cluster: str
    lease_s: float
    clock: Clock
    feed: Callable[[Event], None]
    leader: str | None = None
    """Where the leader listens, as the store said last."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    _wished: NodeRecord | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _lease: int = 0

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
            while not self._changed.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self.lease_s / 4)
                    break
                await self._renew()

    async def _put_node(self) -> None:
        node = self._wished
        if node is None:
            return
        if not self._lease:
            self._lease = (await self.store.grant(self.lease_s)).id
        key = self._key(f"node/{node.id}")
        try:
            await self.store.transact([], [Put(key, encode(node), self._lease)])
        except LeaseGone:
            self._lease = 0
            raise
        self.feed(Registered(self.clock.now(), node))

    async def _renew(self) -> None:
        if not self._lease:
            return
        try:
            if not await self.store.keep(self._lease):
                self._lease = 0
                self.feed(LeaseEnded(self.clock.now()))
        except StoreError:
            self.feed(StoreFailed(self.clock.now()))

    async def leave(self) -> None:
        """Take the node out of the store."""
        if self._lease:
            with contextlib.suppress(StoreError):
                await self.store.revoke(self._lease)

    async def raise_intent(self, intent: Intent) -> None:
        """Store a notice; tried until it stands there, as its id makes it one whatever happens."""
        while True:
            with contextlib.suppress(StoreError):
                key = self._key(f"intent/{intent.id}")
                await self.store.transact([], [Put(key, encode(intent))])
                return
            await asyncio.sleep(RETRY_S)

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
                await asyncio.wait_for(self.woken.wait(), LOOK_S)

    async def _look(self, node: NodeId, held: JobId | None) -> None:
        entry = await self.store.get(self._key("leader"))
        self.leader = None if entry is None else _address(entry.value)
        jobs = await self.store.snapshot(self._key("job/"))
        records = [
            decode(GenerationRecord, entry.value)
            for entry in jobs.entries
            if entry.key.endswith("/gen") and _is_record(entry.value)
        ]
        self.feed(GenerationRead(self.clock.now(), choose(records, node, held)))

    async def watch(self) -> None:
        """A change wakes the looking, and means nothing else; for ever."""
        while True:
            with contextlib.suppress(StoreError):
                after = (await self.store.snapshot(self._key("leader"))).revision
                for_jobs = self.store.watch(self._key("job/"), after=after)
                async with contextlib.aclosing(for_jobs) as changes:
                    async for change in changes:
                        self.woken.set()
                        if isinstance(change, Compacted):
                            break
            await asyncio.sleep(RETRY_S)

    async def read_plan(self, record: GenerationRecord) -> str | None:
        """Return the plan's text; ``None``: it cannot be had now."""
        with contextlib.suppress(StoreError, UnicodeDecodeError):
            entry = await self.store.get(self._key(f"job/{record.job}/plan/{record.plan}"))
            return None if entry is None else entry.value.decode()
        return None

    def _key(self, rest: str) -> str:
        return f"/sailor/v1/{self.cluster}/{rest}"


def choose(
    records: list[GenerationRecord], node: NodeId, held: JobId | None
) -> GenerationRecord | None:
    """Which generation concerns the node: its workers' own job's while it has any, else one that
    is open and counts on it."""
    if held is not None:
        records = [record for record in records if record.job == held]
    return max(
        records,
        key=lambda r: (r.state != "closed" and node in r.members, r.state != "closed", r.job),
        default=None,
    )


def _is_record(value: bytes) -> bool:
    try:
        decode(GenerationRecord, value)
    except WireError:
        return False
    return True


def _address(value: bytes) -> str | None:
    try:
        address = json.loads(value)["address"]
    except (ValueError, KeyError, TypeError):
        return None
    return address if isinstance(address, str) else None
