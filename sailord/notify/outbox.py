"""What others are to be told, kept in the store until they were: no leader's death loses any.

A message has an id that follows from what it tells, so that two leaders make the same one of the
same fact. What a record in the store says is put into the outbox with that record; the rest is
offered by every leader anew and stored unless it was.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field

from agents.protocol.codec import WireError, decode, encode
from agents.protocol.records import Durable, GenerationRecord, JobId, JobRecord
from agents.protocol.store_keys import Keys
from agents.store import Delete, Operation, Put, Snapshot, Store, StoreError
from sailord.cluster_records import Gateway

KEPT = 1_000
"""Messages that stay in the store, delivered or not: they tell what was told."""
FORGOTTEN_AT_ONCE = 50
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Message:
    """One thing to tell; the same fact has the same id, whoever tells it and however often."""

    id: str
    at: float
    kind: str
    """One of ``feed.EventKind``."""
    text: str
    job: str | None = None
    node: str | None = None
    generation: int | None = None
    step: int | None = None
    term: int = 0


def generation_opened(record: GenerationRecord, at: float) -> Message:
    """Tell of a generation whose record is written."""
    return Message(
        id=f"{record.job}.{record.number}.opened",
        at=at,
        kind="generation_opened",
        text=f"generation {record.number} is open: {record.reason}",
        job=record.job,
        generation=record.number,
        step=record.restore.point.step,
        term=record.term,
    )


def job_left(job: JobRecord, at: float, term: int) -> Message | None:
    """Tell of a job that goes on no more; none of any other."""
    if job.state not in {"held", "done", "failed", "cancelled"}:
        return None
    # A job may be held more than once, and each time is news.
    digest = hashlib.sha256(encode(job)).hexdigest()[:12]
    kind = "job_held" if job.state == "held" else "job_finished"
    text = job.reason if job.state == "held" else f"{job.state}: {job.reason}"
    return Message(f"{job.id}.{job.state}.{digest}", at, kind, text, job=job.id, term=term)


def committed_id(job: JobId, durable: Durable) -> str:
    """The id of the news that a checkpoint counts."""
    return f"{job}.{durable.point.generation}-{durable.point.step}.committed"


@dataclass(eq=False)
class Outbox:
    """The messages in the store, in the order in which they came there."""

    gateway: Gateway
    at_of: dict[str, float] = field(default_factory=dict)
    """When what a message tells happened, by id, for all that were told or are to be."""
    bell: asyncio.Event = field(default_factory=asyncio.Event)
    """Rings once, when there may be more to deliver than there was when it was looked up."""
    unheard: dict[str, str] = field(default_factory=dict)
    """Receivers that do not take what they are told now, by host, and why."""
    _offered: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)

    @property
    def store(self) -> Store:
        return self.gateway.store

    @property
    def keys(self) -> Keys:
        return self.gateway.keys

    async def load(self) -> None:
        """Learn what earlier leaders told."""
        entries = (await self.look()).entries
        messages = (
            _message(entry.value) for entry in sorted(entries, key=lambda entry: entry.created)
        )
        self.at_of = {message.id: message.at for message in messages if message is not None}

    async def look(self) -> Snapshot:
        """Everything that is kept."""
        return await self.store.snapshot(self.keys.outbox)

    def offer(self, message: Message) -> None:
        """Store it unless it was told before."""
        if message.id not in self.at_of:
            self.at_of[message.id] = message.at
            self._offered.put_nowait(message)

    def orders_for(self, message: Message | None) -> tuple[Operation, ...]:
        """What stores a message together with the record of which it tells."""
        if message is None:
            return ()
        self.at_of.setdefault(message.id, message.at)
        return (Put(self.keys.outbox + message.id, encode(message)),)

    async def run(self) -> None:
        """Bring what is offered into the store; while that is away it waits.

        Each has a transaction of its own: receivers are told in the order of revisions, and the
        place of each is the revision up to which it was told.
        """
        while True:
            message = await self._offered.get()
            while not await self._store(message):
                await asyncio.sleep(RETRY_S)
            self.ring()

    def ring(self) -> None:
        """Say that there is more to deliver."""
        bell, self.bell = self.bell, asyncio.Event()
        bell.set()

    async def _store(self, message: Message) -> bool:
        """Whether that is settled. What was offered under an earlier term is the next leader's."""
        kept = KEPT + 1 + self._offered.qsize()  # What is not stored yet is not to be forgotten.
        stale = list(self.at_of)[: max(len(self.at_of) - kept, 0)][:FORGOTTEN_AT_ONCE]
        orders: list[Operation] = [Put(self.keys.outbox + message.id, encode(message))]
        orders += [Delete(self.keys.outbox + id_) for id_ in stale]
        try:
            await self.gateway.write_as_leader(message.term, orders)
        except StoreError:
            return False
        for id_ in stale:
            self.at_of.pop(id_, None)  # Who came to lead meanwhile has read them all anew.
        return True


def _message(value: bytes) -> Message | None:
    try:
        return decode(Message, value)
    except WireError:
        return None
