"""The event feed: what happened, numbered, for everyone who follows it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from sailord.core.model.commands import Settled

EventKind = Literal[
    "note",
    "order",
    "transition",
    "generation_opened",
    "generation_running",
    "reconfigured",
    "node_preempted",
    "node_lost",
    "checkpoint_committed",
    "job_held",
    "budget_at_risk",
    "deadline_at_risk",
    "job_finished",
]
KEPT = 5_000
IDS_PER_S = 1_000_000


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """One thing that happened; ids increase, across restarts too."""

    id: int
    at: float
    kind: EventKind
    text: str
    _: KW_ONLY
    job: str | None = None
    node: str | None = None
    generation: int | None = None
    step: int | None = None
    """Step at that moment of the job that this concerns; null while no generation is open."""
    term: int = 0
    is_detail: bool = False
    """A part of a reconfiguration, which one event of kind ``reconfigured`` sums up at its end."""
    order: str = ""
    """The id of the order that this tells."""
    settled: Settled | None = None
    """If this tells how orders ended."""


@dataclass(eq=False)
class Feed:
    """The last events, and a wake-up for those who wait for the next."""

    kept: deque[FeedEvent] = field(default_factory=lambda: deque(maxlen=KEPT))
    _last: int = 0
    _begun: int = 0
    """The last id that an earlier leader gave."""
    _added: asyncio.Event = field(default_factory=asyncio.Event)

    def next_id(self, at: float) -> int:
        """Microseconds since the epoch, or the last id plus one if the clock was set back."""
        self._last = max(int(at * IDS_PER_S), self._last + 1)
        return self._last

    def add(self, event: FeedEvent) -> None:
        """Append an event and wake all followers."""
        self._last = max(self._last, event.id)
        self.kept.append(event)
        added, self._added = self._added, asyncio.Event()
        added.set()

    def restore(self, events: Iterable[FeedEvent]) -> None:
        """Merge events stored by an earlier leader; followers are not woken."""
        known = {event.id for event in self.kept}
        merged = [*self.kept, *(event for event in events if event.id not in known)]
        self.kept = deque(sorted(merged, key=lambda event: event.id), maxlen=KEPT)
        self._last = self._begun = max(self._last, *(event.id for event in merged), 0)

    def after(self, id_: int) -> list[FeedEvent]:
        """Events with a higher id, oldest first.

        An id that this feed has not reached is of a leader whose clock was ahead.
        """
        if id_ > self._last:
            id_ = self._begun
        return [event for event in self.kept if event.id > id_]

    async def follow(self, after: int) -> AsyncIterator[FeedEvent]:
        """Yield the events with a higher id, then each new one."""
        while True:
            added = self._added
            for event in self.after(after):
                after = event.id
                yield event
            await added.wait()
