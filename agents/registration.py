"""The agent's connection to the store: its node under a lease, its notices, and what it reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from agents.core.model import (
    Event,
    GenerationRead,
    GenerationUnreadable,
    JobEnded,
    LeaseEnded,
    Registered,
    StoreFailed,
    StoreSetBack,
)
from agents.daemon.clock import Clock
from agents.daemon.tasks import is_set_within
from agents.daemon.unreadable import UnreadableRecords
from agents.protocol.codec import WireError, decode, encode
from agents.protocol.compression import unpack
from agents.protocol.parts import is_of_another, job_of
from agents.protocol.records import (
    ENDED,
    LIVE,
    Durable,
    GenerationRecord,
    JobId,
    JobRecord,
    Leader,
    NodeId,
    NodeRecord,
    Order,
)
from agents.protocol.store_keys import Keys
from agents.protocol.versions import why_incompatible
from agents.store.change_signal import signal_changes
from agents.store.interface import CreatedAt, Entry, LeaseGone, Put, Store, StoreError
from agents.store.record_reader import RecordReader
from agents.workers.specs import GenerationDetails

T = TypeVar("T")
Looked = Callable[[Mapping[JobId, JobRecord], JobId | None], None]
"""Called after each poll with all jobs, and this node's where several share the cluster."""

RETRY_S = 0.3
POLL_S_MAX = 2.5
"""The longest pause between two polls: a change of the leader triggers no poll."""
KNOWN_S = 600.0
"""How long a node is remembered that has left the store."""


@dataclass(eq=False)
class Registration:
    """Registers one node in the store, and polls the generation that concerns it."""

    store: Store
    keys: Keys
    lease_s: float
    clock: Clock
    feed: Callable[[Event], None]
    jobs_in_memory: Callable[[], set[JobId]] = set
    """The jobs that have snapshots on this node."""
    leader: str | None = None
    """The leader's address, as of the last poll."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to poll now."""
    heard_term: Callable[[], int] = lambda: 0
    """The highest term that this node has heard."""
    keep_s: float = 0.0
    """How long workers go on whose job is not in the store: it was lost, and may be submitted
    again."""
    durables: dict[JobId, Durable] = field(default_factory=dict)
    """The newest committed checkpoint of this node's job, as it was last read."""
    known: dict[NodeId, NodeRecord] = field(default_factory=dict)
    """All nodes seen in the last ``KNOWN_S``, as they were last seen."""
    jobs: dict[JobId, JobRecord] = field(default_factory=dict)
    """All jobs, as they were last read."""
    unreadable: UnreadableRecords = field(default_factory=UnreadableRecords)
    _seen_at: dict[NodeId, float] = field(default_factory=dict)
    _missing_since: float | None = None
    """Since when the store lacks the job of this node's workers."""
    _wished: NodeRecord | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _lease: int = 0
    _of_jobs: RecordReader = field(default_factory=RecordReader)
    _of_nodes: RecordReader = field(default_factory=RecordReader)
    _orders: asyncio.Queue[Order] = field(default_factory=asyncio.Queue)

    # ---- the node -------------------------------------------------------------------------------

    def register(self, node: NodeRecord) -> None:
        """Write the node to the store; a later call supersedes an earlier one."""
        self._wished = node
        self._changed.set()

    async def keep_registered(self) -> None:
        """Renew the lease, and write the node whenever it changes, forever."""
        while True:
            self._changed.clear()
            try:
                await self._put_node()
            except StoreError:
                self.feed(StoreFailed(self.clock.now()))
                await self._renew()  # A full store refuses writes, and still renews leases.
                await asyncio.sleep(RETRY_S)
                continue
            pause_s = self.lease_s / 4
            while not self._changed.is_set():
                if await is_set_within(self._changed, pause_s):
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
        """Renew the lease; return whether the store answered."""
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
        """Remove the node from the store."""
        if self._lease:
            with contextlib.suppress(StoreError):
                await self.store.revoke(self._lease)

    def store_order(self, order: Order) -> None:
        """Queue a notice to be stored."""
        self._orders.put_nowait(order)

    async def store_orders(self) -> None:
        """Store queued notices, with retries, forever.

        Writes are idempotent, and in order: a withdrawal before its notice would have no effect.
        """
        while True:
            order = await self._orders.get()
            while True:
                with contextlib.suppress(StoreError):
                    await self.store.put(self.keys.order(order.id), encode(order))
                    break
                await asyncio.sleep(RETRY_S)

    # ---- reading --------------------------------------------------------------------------------

    async def poll(self, node: NodeId, held: Callable[[], JobId | None], looked: Looked) -> None:
        """Read the generation after each change and at least every ``POLL_S_MAX``, forever."""
        while True:
            self.woken.clear()
            try:
                await self._poll(node, held(), looked)
            except StoreError:
                self.feed(StoreFailed(self.clock.now()))
                await asyncio.sleep(RETRY_S)
                continue
            await is_set_within(self.woken, min(self.lease_s / 4, POLL_S_MAX))

    async def _poll(self, node: NodeId, held: JobId | None, looked: Looked) -> None:
        entry = await self.store.get(self.keys.leader)
        if entry is not None and entry.created < self.heard_term():
            # Its revisions may have meant other records.
            self._of_jobs.clear()
            self._of_nodes.clear()
            self.feed(StoreSetBack(self.clock.now(), entry.created))
        self.leader = None if entry is None else self._leader_address(entry)
        found = (await self.store.snapshot(self.keys.jobs)).entries
        unreadable: dict[str, str] = {}

        def read(kind: type[T], part: str) -> list[T]:
            entries = (entry for entry in found if entry.key.endswith(f"/{part}"))
            return self._of_jobs.read(kind, entries, unreadable)

        jobs = {job.id: job for job in read(JobRecord, "state")}
        # An unreadable job keeps its work folder and its snapshots.
        kept = {id_: job for id_, job in self.jobs.items() if self.keys.state(id_) in unreadable}
        self.jobs = kept | jobs
        records = read(GenerationRecord, "gen")
        record = choose(records, self.jobs, node, held)
        durable = None
        if record is not None:
            of_job = [e for e in found if e.key == self.keys.durable(record.job)]
            durables = self._of_jobs.read(Durable, of_job, unreadable)
            durable = next((each.point for each in durables), None)
            self.durables = dict.fromkeys([record.job], durables[0]) if durables else {}
        self._of_jobs.keep_only(found)
        self.unreadable.note_all(unreadable, prefixes=[self.keys.jobs])
        if held is None or held in self.jobs:
            looked(self.jobs, job_of(node, self.jobs))
        now = self.clock.now()
        job_ids = self.jobs_in_memory() if held is None else {held}
        is_wanted = record is not None and record.state == "open" and node in record.members
        is_unreadable = any(self.keys.generation(job) in unreadable for job in job_ids)
        if (is_unreadable and not (held is None and is_wanted)) or self._waits_for(
            held, record, now
        ):
            self.feed(GenerationUnreadable(now))
        else:
            self.feed(GenerationRead(now, record, durable))
        for id_ in sorted(self.jobs_in_memory() & self.jobs.keys()):
            if self.jobs[id_].state in ENDED or is_of_another(node, id_, self.jobs):
                self.feed(JobEnded(now, id_))

    def _waits_for(self, held: JobId | None, record: GenerationRecord | None, now: float) -> bool:
        """Return whether the store lacks the job of this node's workers, and not for too long.

        Once the job is submitted again, sailord asks this node for what it knows.
        """
        if held is None or record is not None:
            self._missing_since = None
            return False
        if self._missing_since is None:
            self._missing_since = now
            self.unreadable.note(self.keys.state(held), "the store does not know this job, which "
                                 "trains here; submit it again under its id")  # fmt: skip
        return now < self._missing_since + self.keep_s

    def _leader_address(self, entry: Entry) -> str | None:
        try:
            leader = decode(Leader, entry.value)
        except WireError as error:
            self.unreadable.note(entry.key, str(error))
            return None
        apart = why_incompatible(
            leader.protocol, other_is="the leading sailord", this_is="this agent"
        )
        if apart:
            self.unreadable.note(entry.key, apart)
        else:
            self.unreadable.clear(entry.key)
        return leader.address

    async def watch(self) -> None:
        """Poll at once when a job's records change, forever."""
        await signal_changes(self.store, self.keys.jobs, self.woken, small=self.keys.leader)

    async def details_of(self, record: GenerationRecord) -> GenerationDetails | None:
        """Read all that workers need of a generation; ``None``: not available now."""
        with contextlib.suppress(StoreError, UnicodeDecodeError, WireError):  # The poll reports it.
            plan, spec, durable, (nodes, left) = await asyncio.gather(
                self.store.get(self.keys.plan(record.job, record.plan)),
                self.store.get(self.keys.spec(record.job)),
                self.store.get(self.keys.durable(record.job)),
                self._nodes_known(),
            )
            if plan is None or spec is None:
                return None
            return GenerationDetails(
                record,
                unpack(plan.value).decode(),
                spec.value.decode(),
                nodes,
                None if durable is None else decode(Durable, durable.value),
                left,
            )
        return None

    async def job_text(self, job: JobId) -> str | None:
        """Read a job's file, as it was submitted; ``None``: not available now."""
        with contextlib.suppress(StoreError, UnicodeDecodeError):
            spec = await self.store.get(self.keys.spec(job))
            return None if spec is None else spec.value.decode()
        return None

    async def packages_agreed(self, job: JobId, mine: str | None) -> str | None:
        """Return what a job's first node has installed; empty if there is no first node yet.

        ``mine`` is recorded if this node is the first. ``None``: the store does not answer.
        """
        key = self.keys.packages(job)
        with contextlib.suppress(StoreError, UnicodeDecodeError):
            if mine is not None:
                await self.store.transact([CreatedAt(key, 0)], [Put(key, mine.encode())])
            found = await self.store.get(key)
            return "" if found is None else found.value.decode()
        return None

    async def package_sources(self) -> list[str]:
        """Return addresses that may have a job's package: the leader, then all other nodes."""
        own = None if self._wished is None else self._wished.id
        nodes = [each.address for each in await self.nodes() if each.address and each.id != own]
        return [*([] if self.leader is None else [self.leader]), *nodes]

    async def shows_tickets(self, name: str) -> bool:
        """Return whether the workers of a node of this name prove nothing yet."""
        await self.nodes()
        return any(each.name == name and not each.proves_reads for each in self.known.values())

    async def nodes(self) -> tuple[NodeRecord, ...]:
        """Return all registered nodes, or none if the store does not answer."""
        with contextlib.suppress(StoreError):
            found = (await self.store.snapshot(self.keys.nodes)).entries
            unreadable: dict[str, str] = {}
            nodes = tuple(self._of_nodes.read(NodeRecord, found, unreadable))
            self._of_nodes.keep_only(found)
            self.unreadable.note_all(unreadable, prefixes=[self.keys.nodes])
            now = self.clock.now()
            self._seen_at.update((node.id, now) for node in nodes)
            self.known.update((node.id, node) for node in nodes)
            for id_ in [id_ for id_, at in self._seen_at.items() if at < now - KNOWN_S]:
                del self._seen_at[id_], self.known[id_]
            return nodes
        return ()

    async def _nodes_known(self) -> tuple[tuple[NodeRecord, ...], tuple[NodeRecord, ...]]:
        """Return the registered nodes, and those that left lately."""
        present = await self.nodes()
        names = {node.id for node in present}
        return present, tuple(node for id_, node in self.known.items() if id_ not in names)


def choose(
    records: Iterable[GenerationRecord],
    jobs: Mapping[JobId, JobRecord],
    node: NodeId,
    held: JobId | None,
) -> GenerationRecord | None:
    """Choose the generation that concerns the node.

    While the node has workers, that is their job's (``held``). Otherwise, where jobs share the
    cluster, prefer that of the job that has the node; then an open generation
    with this node as a member, then an open one, then one of a job that is live (a held job does
    not train, but its snapshots are still needed), then one of a job that has not ended.
    """
    if held is not None:
        records = [record for record in records if record.job == held]
    owner = job_of(node, jobs)

    def concern(record: GenerationRecord) -> tuple[bool, bool, bool, bool, bool, str]:
        is_open, job = record.state != "closed", jobs.get(record.job)
        return (
            record.job == owner,
            is_open and node in record.members,
            is_open,
            job is not None and job.state in LIVE,
            job is not None and job.state not in ENDED,
            record.job,
        )

    return max(records, key=concern, default=None)
