"""Brings this node's workers into a generation: what they are told, and where they meet."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.daemon.tasks import Tasks
from agents.protocol.records import GenerationRecord, JobId, NodeId, NodeRecord
from agents.registration import RETRY_S, Registration
from agents.workers.gang import Workers
from agents.workers.rank_map import Seating, read_seating
from agents.workers.rendezvous import Meeting
from agents.workers.specs import Briefing, Site, specs, write_home
from agents.workers.status import Word
from simulator.documents.problems import InputError

BRIEF_TRIES = 30
"""Before a generation fails of which the store does not give the plan."""
ASK_AGAIN_S = 0.5
"""Before the agent of rank 0's node is looked for anew."""
HOMES_KEPT = 3
"""So many generations keep their folders, for those who look at them."""


@dataclass(eq=False)
class Joining:
    """From the order to join to the moment when all workers know where they meet."""

    site: Site
    node: Callable[[], NodeRecord]
    registration: Registration
    workers: Workers
    meeting: Meeting
    _search: asyncio.Task[None] | None = None
    _tasks: Tasks = field(default_factory=Tasks)

    async def resume(self, job: JobId | None, generation: int) -> None:
        """Go on with the generation in which an agent before us took part; 0: with none."""
        seating = Seating(0, {}, None)
        with contextlib.suppress(OSError, InputError):
            text = (self.site.home(generation) / "plan.json").read_text(encoding="utf-8")
            seating = read_seating(text, self.node().id)
        await self.workers.open(job, generation, len(seating.devices))
        found = self.workers.spec()
        if found is not None:
            self._seek(seating, found)

    async def join(self, record: GenerationRecord) -> None:
        """Have workers take part in the generation, which has begun for them."""
        briefing = await self._brief(record)
        if briefing is None:
            self.workers.refuse("the store does not give the plan")
            return
        try:
            seating = read_seating(briefing.plan, self.node().id)
        except InputError as error:
            self.workers.refuse("; ".join(map(str, error.problems)))
            return
        if not seating.devices:
            self.workers.refuse("the plan has no place on this node")
            return
        self._forget_homes(record.number)
        write_home(self.site, briefing)
        seats = list(specs(self.site, briefing, seating, self.node()))
        self._seek(seating, seats[0])
        await self.workers.start(seats)

    async def _brief(self, record: GenerationRecord) -> Briefing | None:
        for _ in range(BRIEF_TRIES):
            briefing = await self.registration.brief(record)
            if briefing is not None:
                return briefing
            await asyncio.sleep(RETRY_S)
        return None

    def _forget_homes(self, number: int) -> None:
        shutil.rmtree(self.site.home(number), ignore_errors=True)
        homes = [home for home in self.site.home(0).parent.glob("*") if home.name.isdecimal()]
        homes.sort(key=lambda home: home.stat().st_mtime)
        for home in homes[: 1 - HOMES_KEPT]:
            shutil.rmtree(home, ignore_errors=True)

    # ---- where they meet ------------------------------------------------------------------------

    def hear(self, job: JobId, word: Word) -> None:
        """A worker of this node may say that the place is open."""
        if word.meeting and self.meeting.known(job, word.generation) != word.meeting:
            self._tasks.start(self._tell(job, word))

    async def _tell(self, job: JobId, word: Word) -> None:
        await self.meeting.tell(job, word.generation, word.meeting)
        self.workers.meet(word.generation, word.meeting)

    def _seek(self, seating: Seating, spec: Mapping[str, Any]) -> None:
        if self._search is not None:
            self._search.cancel()
            self._search = None
        first = seating.first
        if first is not None and first != self.node().id:
            self._search = self._tasks.start(self._ask(first, spec))

    async def _ask(self, first: NodeId, spec: Mapping[str, Any]) -> None:
        """Ask until it is said; an agent that was started anew may be at another address."""
        job, generation = spec["job"], spec["generation"]
        peer = spec["peers"].get(first)
        address = None if peer is None else peer["address"]
        while True:
            if address is not None:
                place = await self.meeting.ask(address, job, generation)
                if place is not None:
                    self.workers.meet(generation, place)
                    return
            await asyncio.sleep(ASK_AGAIN_S)
            nodes = await self.registration.nodes()
            address = next((node.address for node in nodes if node.id == first), address)
