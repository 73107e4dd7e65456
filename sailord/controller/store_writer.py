"""Carries out the core's writes to the store, one after the other, each until it is settled."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import assert_never

import structlog

from agents.daemon.clock import Clock
from agents.daemon.failpoints import failpoint
from agents.protocol.codec import WireError
from agents.protocol.records import LIVE, JobId
from agents.store.interface import StoreError, WriteRejected
from sailord.cluster_records import Gateway
from sailord.controller.cluster_state import ClusterState
from sailord.controller.inbox import Inbox
from sailord.core.model.commands import (
    Command,
    CommitCheckpoint,
    GiveOrder,
    SettleOrder,
    Write,
    WriteGeneration,
    WriteJob,
)
from sailord.core.model.events import (
    CheckpointCommitted,
    CommitFailed,
    GenerationWritten,
    JobWriteRejected,
    WriteRefused,
)
from sailord.core.model.state import State
from sailord.notify.outbox import Outbox, generation_opened, job_stopped
from sailord.planning.messages import FoundPlan

log = structlog.get_logger("sailord")

RETRY_S = 0.3
"""Pause before a failed write is retried."""


@dataclass(eq=False)
class StoreWriter:
    """Writes in order; a write that fails is retried until it succeeds or our term ends.

    One that the store rejects for good is dropped, with later ones of the same job; the core is
    told, and holds the job.
    """

    gateway: Gateway
    outbox: Outbox
    cluster: ClusterState
    inbox: Inbox
    clock: Clock
    plans: dict[tuple[JobId, str], FoundPlan] = field(default_factory=dict)
    """Plans that may yet have to be stored, by job and hash."""
    _writes: asyncio.Queue[tuple[int, Write]] = field(default_factory=asyncio.Queue)

    def put(self, term: int, write: Write) -> None:
        """Append a write of our term."""
        self._writes.put_nowait((term, write))

    async def run(self) -> None:
        """Carry out the writes, forever."""
        while True:
            term, write = await self._writes.get()
            while term == self.cluster.term and not await self._try(term, write):
                await asyncio.sleep(RETRY_S)
            self.cluster.store.refused_write = ""

    async def _try(self, term: int, write: Write) -> bool:
        """Try a write once; whether it is settled, by success or by refusal."""
        try:
            is_written = await self._write(term, write)
        except WriteRejected as error:
            if term == self.cluster.term:
                self._reject(write, str(error))
            return True
        except StoreError as error:
            cause, said = type(error).__name__, str(error)
            self.cluster.store.refused_write = said  # A full store answers reads.
            log.warning("write to the store failed; will retry", cause=cause, error=said, term=term)
            return False
        except WireError as error:
            log.error("unreadable record in the store", cause="WireError", what=str(error))
            is_written = False
        name, generation = failpoint_of(write, self.cluster.state)
        failpoint(f"after {name}", generation)
        if term != self.cluster.term:
            return True  # It was of an earlier term: nothing follows for this one.
        if not is_written:
            self.inbox.put(WriteRefused(self.clock.now()))
        elif isinstance(write, WriteGeneration):
            self.outbox.ring()
            self.inbox.put(GenerationWritten(self.clock.now(), write.record))
        return True

    def _reject(self, write: Write, why: str) -> None:
        """Drop a write, and the later ones of its job: they follow from it."""
        job, kind = _job_of(write), type(write).__name__
        log.error("the store rejects a write for good", write=kind, job=job, error=why)
        self.cluster.store.rejected_writes += 1
        if isinstance(write, CommitCheckpoint):
            self._fail_commit(write, why)  # Training goes on without it.
            return
        if job is None:
            return
        for term, later in [self._writes.get_nowait() for _ in range(self._writes.qsize())]:
            if _job_of(later) != job:
                self.put(term, later)
            elif isinstance(later, CommitCheckpoint):
                self._fail_commit(later, why)
        self.inbox.put(JobWriteRejected(self.clock.now(), job, why))

    def _fail_commit(self, write: CommitCheckpoint, why: str) -> None:
        point = write.durable.point
        self.inbox.put(CommitFailed(self.clock.now(), write.record.job, point, why))

    async def _write(self, term: int, write: Write) -> bool:
        """``False``: refused, because another leader or another record was first."""
        match write:
            case WriteGeneration():
                return await self._write_generation(write)
            case WriteJob():
                message = job_stopped(write.job, self.clock.now(), term)
                operations = [self.gateway.put_job(write.job), *self.outbox.operations_for(message)]
                is_written = await self.gateway.write_as_leader(term, operations)
                self.outbox.ring()
                return is_written
            case GiveOrder():
                given = self.gateway.put_order(write.order)
                return await self.gateway.write_as_leader(term, [given])
            case SettleOrder():
                settled = self.gateway.forget_order(write.id)
                return await self.gateway.write_as_leader(term, [settled])
            case CommitCheckpoint():
                return await self._commit(term, write)
            case _:
                assert_never(write)

    async def _write_generation(self, write: WriteGeneration) -> bool:
        job, is_new = write.record.job, write.record.state == "open"
        found = self.plans.get((job, write.record.plan))
        message = generation_opened(write.record, self.clock.now()) if is_new else None
        is_written = await self.gateway.write_generation(
            write.record,
            write.replaces,
            plan=None if found is None else found.plan,
            about=None if found is None else found.about_bytes,
            lowers=write.lowers,
            also=[
                *self.outbox.operations_for(message),
                *([self.gateway.forget_order(write.settles)] if write.settles else ()),
            ],
        )
        if is_written and is_new:
            self._drop_plans_of_ended_jobs(but=job)
        if is_written and write.replaces is not None and is_new:
            kept = {write.record.plan, write.replaces.plan}
            for key in [key for key in self.plans if key[0] == job and key[1] not in kept]:
                del self.plans[key]
            with contextlib.suppress(WriteRejected):  # They only take room.
                await self.gateway.forget_plans(job, but=kept, term=write.record.term)
        return is_written

    def _drop_plans_of_ended_jobs(self, but: JobId) -> None:
        jobs = self.cluster.state.jobs
        live = {but, *(id_ for id_, job in jobs.items() if job.state in LIVE)}
        for key in [key for key in self.plans if key[0] not in live]:
            del self.plans[key]

    async def _commit(self, term: int, write: CommitCheckpoint) -> bool:
        job, durable = write.record.job, write.durable
        became = await self.gateway.commit(durable, write.record, term)
        now = self.clock.now()
        if became == "committed":
            self.inbox.put(CheckpointCommitted(now, job, durable))
        elif became == "late":
            why = "the generation is over, or a later step is durable"
            self.inbox.put(CommitFailed(now, job, durable.point, why))
        return became != "deposed"


def _job_of(write: Write) -> JobId | None:
    match write:
        case WriteGeneration() | CommitCheckpoint():
            return write.record.job
        case WriteJob():
            return write.job.id
        case _:
            return None


def failpoint_of(command: Command, state: State) -> tuple[str, int | None]:
    """The failpoint at which a test may kill sailord, and the generation that it belongs to."""
    if isinstance(command, WriteGeneration):
        return f"WriteGeneration.{command.record.state}", command.record.number
    active = state.active
    generation = None if active is None else active.generation
    return type(command).__name__, None if generation is None else generation.number
