"""Messages for webhook receivers, kept in the store so that no leader's death loses one.

A message's id is derived from the fact that it reports, so two leaders give the same fact the same
id. A fact that is a record in the store is put into the outbox in the record's own transaction;
every other fact is offered by each leader and stored unless it was before.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, field, replace

import structlog

from agents.protocol.codec import encode, plain
from agents.protocol.records import Bill, Durable, GenerationRecord, JobId, JobRecord
from agents.store.interface import Delete, Operation, Put, Snapshot, StoreError, WriteRejected
from sailord.cluster_records import Gateway
from sailord.notify.feed import FeedEvent

log = structlog.get_logger("sailord")

KEPT = 1_000
"""Messages kept in the store, delivered or not: their ids say what was reported."""
DELETED_AT_ONCE = 50
RETRY_S = 1.0

Message = tuple[str, FeedEvent]
"""A fact's id, and the event that reports it. The id of the event itself is not sent."""


def generation_opened(record: GenerationRecord, at: float) -> Message:
    """Report that a generation's record was written."""
    return f"{record.job}.{record.number}.opened", FeedEvent(
        id=0,
        at=at,
        kind="generation_opened",
        text=f"generation {record.number} is open: {record.reason}",
        job=record.job,
        generation=record.number,
        step=record.restore.point.step,
        term=record.term,
    )


def job_stopped(job: JobRecord, at: float, term: int) -> Message | None:
    """Report that a job was held or has ended; ``None`` in any other state."""
    if job.state not in {"held", "done", "failed", "cancelled"}:
        return None
    # A job may be held several times; the digest tells them apart. A bill changes meanwhile.
    digest = hashlib.sha256(encode(replace(job, bill=Bill()))).hexdigest()[:12]
    id_ = f"{job.id}.{job.state}.{digest}"
    if job.state == "held":
        return id_, FeedEvent(0, at, "job_held", job.reason, job=job.id, term=term)
    text = f"{job.state}: {job.reason}"
    return id_, FeedEvent(0, at, "job_finished", text, job=job.id, term=term)


def committed_id(job: JobId, durable: Durable) -> str:
    """The id of the message that a checkpoint was committed."""
    return f"{job}.{durable.point.generation}-{durable.point.step}.committed"


@dataclass(eq=False)
class Outbox:
    """The messages in the store, in order of writing."""

    gateway: Gateway
    at_of: dict[str, float] = field(default_factory=dict)
    """Time of each reported fact, by message id."""
    bell: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once when there may be new messages to deliver."""
    failing: dict[str, str] = field(default_factory=dict)
    """Receivers that do not accept messages at present: host and cause, by the key of each."""
    _offered: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)

    @property
    def waiting(self) -> int:
        """The number of messages that are not stored yet."""
        return self._offered.qsize()

    async def load(self) -> None:
        """Read which facts earlier leaders reported."""
        entries = sorted((await self.read()).entries, key=lambda entry: entry.created)
        reported = (_id_and_time(entry.value) for entry in entries)
        self.at_of = dict(each for each in reported if each is not None)

    async def read(self) -> Snapshot:
        """All stored messages."""
        return await self.gateway.store.snapshot(self.gateway.keys.outbox)

    def offer(self, id_: str, event: FeedEvent) -> None:
        """Store a message unless its fact was reported before."""
        if id_ not in self.at_of:
            self.at_of[id_] = event.at
            self._offered.put_nowait((id_, event))

    def operations_for(self, message: Message | None) -> tuple[Operation, ...]:
        """Store operations that write a message together with the record it reports."""
        if message is None:
            return ()
        id_, event = message
        self.at_of.setdefault(id_, event.at)
        return (self._put(id_, event),)

    def _put(self, id_: str, event: FeedEvent) -> Put:
        return Put(self.gateway.keys.outbox + id_, encode(plain(event) | {"id": id_}))

    async def run(self) -> None:
        """Store offered messages; while the store is unavailable they wait.

        Each has a transaction of its own: receivers are sent messages in order of revision, and
        each receiver's cursor is a revision.
        """
        while True:
            id_, event = await self._offered.get()
            while not await self._store(id_, event):
                await asyncio.sleep(RETRY_S)
            self.ring()

    def ring(self) -> None:
        """Wake the senders: there may be new messages."""
        bell, self.bell = self.bell, asyncio.Event()
        bell.set()

    async def _store(self, id_: str, event: FeedEvent) -> bool:
        """Store a message and delete the oldest; ``False``: try again.

        A message offered under an earlier term is not written; the next leader offers it again.
        """
        kept = KEPT + 1 + self._offered.qsize()  # Messages not stored yet must not count as old.
        stale = list(self.at_of)[: max(len(self.at_of) - kept, 0)][:DELETED_AT_ONCE]
        operations: list[Operation] = [self._put(id_, event)]
        operations += [Delete(self.gateway.keys.outbox + old) for old in stale]
        try:
            await self.gateway.write_as_leader(event.term, operations)
        except WriteRejected as error:
            log.error("the store rejects a message for good", message=id_, error=str(error))
        except StoreError:
            return False
        for old in stale:
            self.at_of.pop(old, None)  # It may be gone: load() runs at each election.
        return True


def _id_and_time(value: bytes) -> tuple[str, float] | None:
    try:
        message = json.loads(value)
        return str(message["id"]), float(message["at"])
    except (ValueError, KeyError, TypeError):
        return None
