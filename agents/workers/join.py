"""Brings this node's workers into a generation: their specs, and the address where ranks meet."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.daemon.error_text import describe_error
from agents.daemon.tasks import Tasks
from agents.protocol.records import GenerationRecord, JobId, NodeId, NodeRecord
from agents.workers.gang import WorkerGang
from agents.workers.rendezvous import Rendezvous
from agents.workers.specs import (
    GenerationDetails,
    RankMap,
    WorkerSettings,
    read_rank_map,
    specs,
    write_generation_files,
)
from agents.workers.status import WorkerStatus
from simulator.documents.problems import InputError

DETAILS_ATTEMPTS = 30
"""Attempts to read a generation's plan before the generation fails on this node."""
DETAILS_RETRY_S = 0.3
ASK_AGAIN_S = 0.5
"""Pause before rank 0's node is looked up and asked again."""
HOMES_KEPT = 3
"""Generations whose folders are kept for inspection."""


@dataclass(eq=False)
class GenerationJoiner:
    """Handles a join command until all workers know the address where the ranks meet."""

    settings: WorkerSettings
    node: Callable[[], NodeRecord]
    details_of: Callable[[GenerationRecord], Awaitable[GenerationDetails | None]]
    """Reads a generation's details from the store; ``None``: not available now."""
    nodes: Callable[[], Awaitable[tuple[NodeRecord, ...]]]
    """Reads all registered nodes from the store."""
    gang: WorkerGang
    rendezvous: Rendezvous
    work_of: Callable[[JobId], Awaitable[Mapping[str, Any] | str]]
    """The job's work folder as workers need it; a text: why this node has none."""
    _search: asyncio.Task[None] | None = None
    _tasks: Tasks = field(default_factory=Tasks)

    async def resume(self, job: JobId | None, generation: int) -> None:
        """Take over the workers of a previous agent process; ``generation`` 0: there are none."""
        rank_map = RankMap(0, {}, None)
        with contextlib.suppress(OSError, InputError):
            text = (self.settings.home(generation) / "plan.json").read_text(encoding="utf-8")
            rank_map = read_rank_map(text, self.node().id)
        await self.gang.open(job, generation, len(rank_map.devices))
        found = self.gang.spec()
        if found is not None:
            self._find_rendezvous(rank_map, found)

    async def join(self, record: GenerationRecord) -> None:
        """Start this node's workers of a generation."""
        details = await self._read_details(record)
        if not self._is_present(record):
            return
        if details is None:
            self.gang.refuse("the plan cannot be read from the store")
            return
        try:
            rank_map = read_rank_map(details.plan, self.node().id)
        except InputError as error:
            self.gang.refuse("; ".join(map(str, error.problems)))
            return
        if not rank_map.devices:
            self.gang.refuse("the plan has no rank on this node")
            return
        work = await self.work_of(record.job)
        await self.gang.wait_reconnected()
        if not self._is_present(record):
            return
        if isinstance(work, str):
            self.gang.refuse(work)
            return
        try:
            self._delete_old_homes(record.number)
            write_generation_files(self.settings, details)
            all_specs = list(specs(self.settings, details, rank_map, self.node(), work))
        except OSError as error:
            self.gang.refuse(describe_error(error, self.settings.home(record.number)))
            return
        except InputError as error:
            self.gang.refuse("; ".join(map(str, error.problems)))
            return
        self._find_rendezvous(rank_map, all_specs[0])
        await self.gang.start(all_specs)

    def _is_present(self, record: GenerationRecord) -> bool:
        """Return whether no other generation has begun meanwhile."""
        return (record.job, record.number) == (self.gang.job, self.gang.generation)

    async def _read_details(self, record: GenerationRecord) -> GenerationDetails | None:
        for _ in range(DETAILS_ATTEMPTS):
            details = await self.details_of(record)
            if details is not None:
                return details
            await asyncio.sleep(DETAILS_RETRY_S)
        return None

    def _delete_old_homes(self, number: int) -> None:
        shutil.rmtree(self.settings.home(number), ignore_errors=True)
        homes = [home for home in self.settings.home(0).parent.glob("*") if home.name.isdecimal()]
        homes.sort(key=lambda home: home.stat().st_mtime)
        for home in homes[: 1 - HOMES_KEPT]:
            shutil.rmtree(home, ignore_errors=True)

    # ---- the rendezvous -------------------------------------------------------------------------

    def hear(self, job: JobId, status: WorkerStatus) -> None:
        """Publish the address if this node's rank 0 has opened it; no other rank may say it."""
        if (
            status.rank == 0
            and status.meeting
            and self.rendezvous.known(job, status.generation) != status.meeting
        ):
            self._tasks.start(self._publish(job, status))

    async def _publish(self, job: JobId, status: WorkerStatus) -> None:
        await self.rendezvous.publish(job, status.generation, status.meeting)
        self.gang.send_rendezvous(status.generation, status.meeting)

    def _find_rendezvous(self, rank_map: RankMap, spec: Mapping[str, Any]) -> None:
        if self._search is not None:
            self._search.cancel()
            self._search = None
        first = rank_map.first
        if first is not None and first != self.node().id:
            self._search = self._tasks.start(self._ask(first, spec))

    async def _ask(self, first: NodeId, spec: Mapping[str, Any]) -> None:
        """Ask rank 0's node until it answers; an agent that restarted may have a new address."""
        job, generation = spec["job"], spec["generation"]
        peer = spec["peers"].get(first)
        at = None if peer is None else (peer["address"], peer["name"])
        while True:
            if at is not None:
                meeting = await self.rendezvous.ask(*at, job, generation)
                if meeting is not None:
                    self.gang.send_rendezvous(generation, meeting)
                    return
            await asyncio.sleep(ASK_AGAIN_S)
            now = (node for node in await self.nodes() if node.id == first)
            at = next(((node.address, node.name) for node in now), at)
