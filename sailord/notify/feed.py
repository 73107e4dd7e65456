"""What happened, numbered, for everybody who wants to follow it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal[
    "note",
    "transition",
    "generation_opened",
    "generation_running",
    "node_preempted",
    "node_lost",
    "checkpoint_committed",
    "job_held",
    "job_finished",
]
KEPT = 5_000
IDS_PER_S = 1_000_000


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that happened; ``id`` grows with each, over restarts too."""

    id: int
    at: float
    kind: EventKind
    text: str
    job: str | None = None
    node: str | None = None
    generation: int | None = None
    step: int | None = None
    """Where the job that has the cluster was then; ``None``: no generation was open."""
    term: int = 0


@dataclass(eq=False)
class Feed:
    """The last happenings, and a bell for those who wait for the next."""

    kept: deque[Happening] = field(default_factory=lambda: deque(maxlen=KEPT))
    _last: int = 0
    _bell: asyncio.Event = field(default_factory=asyncio.Event)

    def next_id(self, at: float) -> int:
        """Microseconds since the epoch, or just above the last one: a clock set back harms not."""
        self._last = max(int(at * IDS_PER_S), self._last + 1)
        return self._last

    def add(self, happening: Happening) -> None:
        """Tell everybody."""
        self._last = max(self._last, happening.id)
        self.kept.append(happening)
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()

    def recall(self, happenings: Iterable[Happening]) -> None:
        """Take over what an earlier leader stored; nobody is told."""
        known = {happening.id for happening in self.kept}
        merged = [*self.kept, *(h for h in happenings if h.id not in known)]
        self.kept = deque(sorted(merged, key=lambda h: h.id), maxlen=KEPT)
        self._last = max(self._last, *(h.id for h in merged), 0)

    def after(self, id_: int) -> list[Happening]:
        """Those with a higher id, oldest first."""
        return [happening for happening in self.kept if happening.id > id_]

    async def follow(self, after: int) -> AsyncIterator[Happening]:
        """Yield those with a higher id, and then each as it happens."""
        while True:
            bell = self._bell
            for happening in self.after(after):
                after = happening.id
                yield happening
            await bell.wait()
