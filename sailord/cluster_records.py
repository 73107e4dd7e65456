"""Reads and writes sailord's records in the store.

A leader's writes, except lines of a history, are fenced by its term. Everything is read in one
snapshot. A write with unknown outcome is settled by reading. A record that cannot be read is passed
over, and never overwritten or deleted; a record that is written anew keeps the fields that a newer
version added (ADR 70).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeVar

from agents.daemon.unreadable import UnreadableRecords
from agents.protocol.codec import WireError, decode, encode, unknown_fields
from agents.protocol.compression import pack, unpack
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
from agents.store.interface import (
    Compare,
    CreatedAt,
    Delete,
    ModifiedAt,
    Operation,
    Put,
    Store,
    WriteUnknown,
)
from agents.store.record_reader import RecordReader
from sailord.core.queries.reconfiguration_timing import ReconfigurationTiming

T = TypeVar("T")
Commitment = Literal["committed", "late", "deposed"]
"""Outcome of a commit: done; too late; or another sailord is the leader."""
Given = Literal["new", "known", "other"]
"""Outcome of storing an order: new; known; or the id belongs to another order."""
SPECS_MAX = 16
HISTORY_MAX = 200
"""Transitions stored per job."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One line of a job's history."""

    id: int
    at: float
    text: str
    generation: int | None = None
    step: int | None = None
    term: int = 0
    move: ReconfigurationTiming | None = None
    """Timing of the reconfiguration that ended here."""
    is_detail: bool = False
    """A part of a reconfiguration, which a line with ``move`` sums up."""
    kind: str = ""
    """The kind of its event; empty in lines of versions that did not write it."""
    node: str | None = None
    order: str = ""
    """The id of the order that this tells."""


@dataclass(frozen=True, slots=True)
class StoredRecords:
    """Everything that decisions depend on, at one revision."""

    revision: int
    _: KW_ONLY
    nodes: tuple[NodeRecord, ...]
    jobs: tuple[JobRecord, ...]
    generations: tuple[GenerationRecord, ...]
    durables: tuple[tuple[JobId, Durable], ...]
    orders: tuple[Order, ...]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """By key: why a record cannot be read, or its writer not be understood."""
    nodes_unreadable: frozenset[NodeId] = frozenset()
    set_aside: frozenset[JobId] = frozenset()
    """Jobs that are not among ``jobs``, as one of their records cannot be read."""
    blocking: frozenset[JobId] = frozenset()
    """Those of them that may have the cluster."""


def what_is_ordered(order: Order) -> tuple[Any, ...]:
    """Return what an order and its repetition under the same id have in common."""
    # A repeated "in 30 s" has another absolute time but is the same order.
    return order.kind, order.target, order.usd_max, order.priority


@dataclass(eq=False)
class Gateway:
    """Access to the records of one cluster."""

    store: Store
    keys: Keys
    unreadable: UnreadableRecords = field(default_factory=UnreadableRecords)
    _reader: RecordReader = field(default_factory=lambda: RecordReader((JobRecord, Order)))
    _specs: dict[JobId, str] = field(default_factory=dict)
    """Jobs' files, so that planning works while the store is unavailable."""

    async def read_records(self) -> StoredRecords:
        """Read everything in one snapshot."""
        snapshot = await self.store.snapshot(self.keys.all)
        faults: dict[str, str] = {}
        read = self._reader.read
        nodes: list[NodeRecord] = []
        jobs: list[JobRecord] = []
        generations: list[GenerationRecord] = []
        durables: list[tuple[JobId, Durable]] = []
        orders: list[tuple[int, Order]] = []
        aside: set[JobId] = set()
        apart = dict[str, str]()
        for entry in snapshot.entries:
            part = self.keys.job_part(entry.key)
            if entry.key == self.keys.leader:
                for leader in read(Leader, [entry], faults):
                    apart[entry.key] = why_incompatible(
                        leader.protocol,
                        other_is=f"sailord on {leader.host}",
                        this_is="this sailord",
                    )
            elif entry.key.startswith(self.keys.nodes):
                for node in read(NodeRecord, [entry], faults):
                    nodes.append(node)
                    apart[entry.key] = why_incompatible(
                        node.protocol, other_is="its agent", this_is="sailord"
                    )
            elif entry.key.startswith(self.keys.orders):
                for order in read(Order, [entry], faults):
                    orders.append((entry.created, order))
            elif part is None:
                continue
            elif part[1] == "state":
                jobs += read(JobRecord, [entry], faults)
            elif part[1] == "gen":
                generations += read(GenerationRecord, [entry], faults)
            elif part[1] == "durable":
                found = read(Durable, [entry], faults)
                durables += [(part[0], durable) for durable in found]
            if part is not None and entry.key in faults:
                aside.add(part[0])
        self._reader.keep_only(snapshot.entries)
        is_free = {job.id for job in jobs if job.state not in LIVE}
        is_free |= {each.job for each in generations if each.state == "closed"}
        named = {each.job for each in generations}
        named |= {job for job in aside if self.keys.generation(job) in faults}
        prefix = len(self.keys.nodes)
        return StoredRecords(
            snapshot.revision,
            nodes=tuple(nodes),
            jobs=tuple(job for job in jobs if job.id not in aside),
            generations=tuple(each for each in generations if each.job not in aside),
            durables=tuple(each for each in durables if each[0] not in aside),
            orders=tuple(order for _, order in sorted(orders, key=lambda pair: pair[0])),
            unreadable={**faults, **{key: why for key, why in apart.items() if why}},
            nodes_unreadable=frozenset(
                NodeId(key[prefix:]) for key in faults if key.startswith(self.keys.nodes)
            ),
            set_aside=frozenset(aside),
            blocking=frozenset(job for job in aside & named if job not in is_free),
        )

    # ---- written by the leader only -----------------------------------------------------------

    async def write_generation(
        self,
        record: GenerationRecord,
        replaces: GenerationRecord | None,
        *,
        plan: bytes | None,
        about: bytes | None,
        lowers: Durable | None = None,
        also: Sequence[Operation] = (),
    ) -> bool:
        """Replace ``replaces`` by the record; ``False``: the store has another record.

        In the same transaction ``lowers``, if given, becomes the newest checkpoint, and ``also``
        is carried out. Idempotent; raises what the store raises.
        """
        key = self.keys.generation(record.job)
        there = await self.store.get(key)
        present = None if there is None else decode(GenerationRecord, unpack(there.value))
        if present == record:
            return True
        if present != replaces:
            return False
        newer = {}
        if there is not None and present is not None and present.number == record.number:
            newer = unknown_fields(GenerationRecord, unpack(there.value))
        operations: list[Operation] = [Put(key, pack(encode(record, newer))), *also]
        if replaces is None or record.number != replaces.number:
            if plan is not None:
                operations.append(Put(self.keys.plan(record.job, record.plan), pack(plan)))
            if about is not None:
                operations.append(Put(self.keys.about(record.job, record.plan), pack(about)))
        if lowers is not None:
            operations.append(Put(self.keys.durable(record.job), encode(lowers)))
        compares: list[Compare] = [
            ModifiedAt(key, 0 if there is None else there.modified),
            CreatedAt(self.keys.leader, record.term),
        ]
        return (await self.store.transact(compares, operations)).is_applied

    async def commit(self, durable: Durable, record: GenerationRecord, term: int) -> Commitment:
        """Make a checkpoint of the generation the newest, in one transaction. Idempotent."""
        generation_key = self.keys.generation(record.job)
        durable_key = self.keys.durable(record.job)
        while True:
            there = await self.store.get(durable_key)
            known = None if there is None else decode(Durable, there.value)
            if known == durable:
                return "committed"
            if known is not None and known.point.step >= durable.point.step:
                return "late"
            present = await self.store.get(generation_key)
            if present is None:
                return "late"
            now = decode(GenerationRecord, unpack(present.value))
            if now.number != record.number or now.state == "closed":
                return "late"
            compares: list[Compare] = [
                CreatedAt(self.keys.leader, term),
                ModifiedAt(generation_key, present.modified),
                ModifiedAt(durable_key, 0 if there is None else there.modified),
            ]
            order = Put(durable_key, encode(durable))
            if (await self.store.transact(compares, [order])).is_applied:
                return "committed"
            leader = await self.store.get(self.keys.leader)
            if leader is None or leader.created != term:
                return "deposed"

    async def write_as_leader(self, term: int, operations: Sequence[Operation]) -> bool:
        """Carry out the operations if we are still the leader of this term."""
        return (
            await self.store.transact([CreatedAt(self.keys.leader, term)], operations)
        ).is_applied

    def put_job(self, job: JobRecord) -> Operation:
        key = self.keys.state(job.id)
        return Put(key, encode(job, self._reader.newer.get(key)))

    def put_order(self, order: Order) -> Operation:
        key = self.keys.order(order.id)
        return Put(key, encode(order, self._reader.newer.get(key)))

    def forget_order(self, id_: str) -> Operation:
        return Delete(self.keys.order(id_))

    async def forget_job(self, job: JobId, term: int) -> bool:
        """Delete all records of an ended job as leader of the term, its state last.

        ``False``: we do not lead, or the job was submitted again.
        """
        state = await self.store.get(self.keys.state(job))
        if state is None:
            return True
        if decode(JobRecord, unpack(state.value)).state not in ENDED:
            return False
        papers = (await self.store.snapshot(f"{self.keys.papers}{job}/")).entries
        for first in range(0, len(papers), 100):
            batch = [Delete(entry.key) for entry in papers[first : first + 100]]
            if not await self.write_as_leader(term, batch):
                return False
        keys = self.keys.spec(job), self.keys.generation(job), self.keys.durable(job), state.key
        compares: list[Compare] = [
            CreatedAt(self.keys.leader, term),
            ModifiedAt(state.key, state.modified),
        ]
        done = await self.store.transact(compares, [Delete(key) for key in keys])
        self._specs.pop(job, None)
        return done.is_applied

    async def forget_plans(self, job: JobId, *, but: Iterable[str], term: int) -> None:
        """Delete all plans but these."""
        kept = set(but)
        stale = []
        for part in ("plan", "about"):
            snapshot = await self.store.snapshot(f"{self.keys.papers}{job}/{part}/")
            stale += [e.key for e in snapshot.entries if e.key.rpartition("/")[2] not in kept]
        if stale:
            await self.write_as_leader(term, [Delete(key) for key in stale[:100]])

    async def write_transition(
        self, job: JobId, transition: Transition, operations: Sequence[Operation] = ()
    ) -> None:
        """Append to a job's history and delete the oldest lines beyond ``HISTORY_MAX``.

        ``operations`` are carried out in the same transaction.

        Not fenced: a fact remains true after its leader's term.
        """
        prefix = f"{self.keys.papers}{job}/history/"
        lines = (await self.store.snapshot(prefix)).entries
        old = [Delete(e.key) for e in lines[: max(len(lines) - HISTORY_MAX, 0)][:100]]
        new = Put(self.keys.history(job, transition.id), encode(transition))
        await self.store.transact([], [new, *operations, *old])

    # ---- read and written by every sailord ----------------------------------------------------

    async def read_history(self, job: JobId) -> tuple[Transition, ...]:
        """The transitions of a job, oldest first."""
        prefix = f"{self.keys.papers}{job}/history/"
        read: list[Transition] = []
        faults: dict[str, str] = {}
        for entry in (await self.store.snapshot(prefix)).entries:
            try:
                read.append(decode(Transition, entry.value))
            except WireError as error:
                faults[entry.key] = str(error)
        self.unreadable.note_all(faults, prefixes=[prefix])
        return tuple(read)

    async def read_plan(self, job: JobId, sha: str) -> bytes | None:
        entry = await self.store.get(self.keys.plan(job, sha))
        try:
            return None if entry is None else unpack(entry.value)
        except WireError:
            return None

    async def read_about(self, job: JobId, sha: str) -> dict[str, object]:
        """The planner's account of a plan; empty if missing or unreadable."""
        entry = await self.store.get(self.keys.about(job, sha))
        try:
            value = {} if entry is None else json.loads(unpack(entry.value))
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    async def read_spec(self, job: JobId) -> str | None:
        """The job's file as submitted; it never changes."""
        if job not in self._specs:
            entry = await self.store.get(self.keys.spec(job))
            if entry is None:
                return None
            while len(self._specs) >= SPECS_MAX:
                del self._specs[next(iter(self._specs))]
            try:
                self._specs[job] = entry.value.decode()
            except UnicodeDecodeError as error:
                self.unreadable.note(entry.key, str(error))
                return None
        return self._specs[job]

    async def submit(self, job: JobRecord, spec: str, durable: Durable | None = None) -> bool:
        """Add a job to the queue; ``False``: the id is taken.

        ``durable`` is the checkpoint to start from.
        """
        state = self.keys.state(job.id)
        operations = [Put(self.keys.spec(job.id), spec.encode()), self.put_job(job)]
        if durable is not None:
            operations.append(Put(self.keys.durable(job.id), encode(durable)))
        try:
            return (await self.store.transact([ModifiedAt(state, 0)], operations)).is_applied
        except WriteUnknown:
            # The submission time distinguishes our job from another with the same id.
            there = await self.store.get(state)
            if there is None:
                raise
            try:
                return decode(JobRecord, there.value).submitted_at == job.submitted_at
            except WireError:
                return False

    async def give_order(self, order: Order) -> Given:
        """Store an order under its id (idempotency key)."""
        return await self.put_once(self.keys.order(order.id), order, what_is_ordered)

    async def stored_order(self, id_: str) -> Order | None:
        """Return the order under this id, until it is carried out."""
        there = await self.store.get(self.keys.order(id_))
        try:
            return None if there is None else decode(Order, there.value)
        except WireError:
            return None

    async def put_once(
        self, key: str, record: T, what: Callable[[T], object], also: Sequence[Operation] = ()
    ) -> Given:
        """Store a record unless its key is taken; ``what`` is equal in a repeat."""
        outcome = await self.store.transact([ModifiedAt(key, 0)], [Put(key, encode(record)), *also])
        if outcome.is_applied:
            return "new"
        there = await self.store.get(key)
        if there is None:
            return "known"  # It was deleted just now.
        try:
            known = decode(type(record), there.value)
        except WireError:
            return "other"
        return "known" if what(known) == what(record) else "other"
