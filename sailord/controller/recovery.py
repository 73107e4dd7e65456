"""Recovers from agents what a store that was lost or restored does not know of its jobs.

An agent learns of a generation from the store alone. So if it has heard of a later one than the
store holds, the store was set back: to a backup, or to nothing, with the job submitted again. Then
the agent is asked for the record, plan and newest checkpoint, and they are stored; the controller
reads everything anew and goes on from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import structlog

from agents.protocol.codec import WireError, decode, encode
from agents.protocol.compression import pack, unpack
from agents.protocol.records import (
    ENDED,
    LIVE,
    Durable,
    GenerationRecord,
    JobId,
    JobRecord,
    KnownGeneration,
)
from agents.rpc.client import CallFailed
from agents.store.interface import Compare, CreatedAt, ModifiedAt, Operation, Put
from sailord.cluster_records import Gateway, StoredRecords
from sailord.controller.agent_client import AgentClient
from sailord.core.model.nodes import Node
from sailord.core.model.state import State

log = structlog.get_logger("sailord")

INTERVAL_S = 1.0


@dataclass(eq=False)
class Recovery:
    """Compares what agents report with what the store holds."""

    gateway: Gateway
    agents: AgentClient
    unknown: Mapping[str, str] = field(default_factory=dict)
    """By key: jobs that nodes train but that the store does not have."""
    _compared_at: float = -math.inf

    def is_due(self, records: StoredRecords, state: State, now: float) -> bool:
        """Return whether to compare: each second, and at once when a job is new.

        Its first generation follows those of its checkpoints. So it may be later than the one that
        nodes still train, which could then not be recovered.
        """
        is_new = any(job.id not in state.jobs for job in records.jobs)
        if not is_new and now < self._compared_at + INTERVAL_S:
            return False
        self._compared_at = now
        return True

    async def recover(self, records: StoredRecords, state: State) -> bool:
        """Store records that only agents still have; return whether anything was stored."""
        jobs = {job.id: job for job in records.jobs}
        newest = {record.job: record for record in records.generations}
        running = {job for job, record in newest.items() if _is_running(record, state)}
        ahead: dict[JobId, list[Node]] = {}
        unknown: dict[str, str] = {}
        for node in state.nodes.values():
            report = node.report
            if report is None or node.is_lost or report.job is None or not report.heard.generation:
                continue
            job = report.job
            if job in jobs:
                number = newest[job].number if job in newest else 0
                is_live = job not in running and jobs[job].state not in ENDED
                if is_live and report.heard.generation > number:
                    ahead.setdefault(job, []).append(node)
            elif job not in records.set_aside and report.generation:
                unknown[self.gateway.keys.state(job)] = (
                    f"{node.record.name} trains {job}, which the store does not know: submit its "
                    f"file again with --id {job} (and --resume newest, if it has checkpoints), or "
                    "drain the node"
                )
        self.unknown = unknown
        found = [
            await self._recover(jobs[job], nodes, records, state) for job, nodes in ahead.items()
        ]
        return any(found)

    async def _recover(
        self, job: JobRecord, nodes: list[Node], records: StoredRecords, state: State
    ) -> bool:
        key = self.gateway.keys.generation(job.id)
        there = await self.gateway.store.get(key)
        try:
            number = 0 if there is None else decode(GenerationRecord, unpack(there.value)).number
        except WireError:
            return False
        for node in sorted(nodes, key=_newest_first):
            if node.report is None or node.report.heard.generation <= number:
                continue  # It had read a record that was stored just after our read.
            try:
                known = await self.agents.known_generation(node.record)
            except CallFailed as error:
                log.warning("the store was set back, and a node does not say what it knows",
                            job=job.id, node=node.record.id, error=str(error))  # fmt: skip
                continue
            is_member = node.record.id in known.record.members
            if is_member and known.record.job == job.id and known.record.number > number:
                modified = 0 if there is None else there.modified
                named = (state.nodes.get(id_) for id_ in known.record.members)
                heard = (node.report for node in named if node is not None)
                if not any(each is not None and each.speaks_of(known.record) for each in heard):
                    known = replace(known, record=replace(known.record, state="closed"))
                return await self._store(job, known, modified, records)
        return False

    async def _store(
        self, job: JobRecord, known: KnownGeneration, modified: int, records: StoredRecords
    ) -> bool:
        keys, store = self.gateway.keys, self.gateway.store
        if await self.gateway.read_spec(job.id) != known.job:
            log.error("the store was set back, and the job was submitted with another file than "
                      "its nodes train: submit that one", job=job.id)  # fmt: skip
            return False
        leader = await store.get(keys.leader)
        if leader is None:
            return False
        record = replace(known.record, term=leader.created)
        orders: list[Operation] = [
            Put(keys.generation(job.id), pack(encode(record))),
            Put(keys.plan(job.id, record.plan), pack(known.plan.encode())),
        ]
        durable = dict(records.durables).get(job.id)
        if known.durable is not None and _is_later(known.durable, durable):
            orders.append(Put(keys.durable(job.id), encode(known.durable)))
        if not any(each.state in LIVE and each.id != job.id for each in records.jobs):
            orders.append(self.gateway.put_job(replace(job, state="running", reason="")))
        compares: list[Compare] = [
            CreatedAt(keys.leader, leader.created),
            ModifiedAt(keys.generation(job.id), modified),
        ]
        is_stored = (await store.transact(compares, orders)).is_applied
        if is_stored:
            log.warning("the store was set back: a generation was recovered from its nodes",
                        job=job.id, generation=record.number, cause="Recovery")  # fmt: skip
        return is_stored


def _is_running(record: GenerationRecord, state: State) -> bool:
    """Return whether a node runs this generation: then the store is right."""
    reports = (node.report for node in state.nodes.values() if not node.is_lost)
    return any(
        each is not None and each.taking == "running" and each.speaks_of(record) for each in reports
    )


def _newest_first(node: Node) -> tuple[int, str]:
    assert node.report is not None
    return -node.report.heard.generation, node.record.id


def _is_later(one: Durable, other: Durable | None) -> bool:
    return other is None or one.point.step > other.point.step
