"""Words that the machine goes away, from wherever they come: one notice for one going.

The metadata server's flag, its word of maintenance, and the shutdown of the system may all tell
of the same going. They share one id, which stands until all of them have been taken back; the
next going has another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import aiohttp

from agents.cloud.gce_metadata import follow
from agents.core.model import Event, NoticeSeen, NoticeWithdrawn
from agents.daemon.clock import Clock
from agents.protocol.records import NodeId

PREFIX = "going-"
PREEMPTED, MAINTENANCE, SHUTDOWN = "preempted", "maintenance-event", "shutdown"
GOING = {PREEMPTED: "TRUE", MAINTENANCE: "TERMINATE_ON_HOST_MAINTENANCE"}
"""What the metadata server says under each of these while the machine is about to go. A machine
that will only be moved stays."""


@dataclass(eq=False)
class Notices:
    """What each source says, and the notice that follows from it."""

    node: NodeId
    notice_s: float
    """From the cloud's flag to the end of the machine."""
    shutdown_s: float
    """From the beginning of a shutdown to it, which may be far less."""
    clock: Clock
    feed: Callable[[Event], None]
    standing: str | None = None
    """The id of the notice that was given and not taken back."""
    _said: dict[str, bool] = field(default_factory=dict)

    def recall(self, ids: Collection[str]) -> None:
        """Go on with what an agent before us had noticed."""
        self.standing = max((id_ for id_ in ids if id_.startswith(PREFIX)), default=None)

    def hear(self, source: str, *, is_going: bool) -> None:
        """Take a source's word, said anew or again."""
        is_news = self._said.get(source) != is_going
        self._said[source] = is_going
        if is_going and is_news:
            now = self.clock.now()
            if self.standing is None:
                self.standing = f"{PREFIX}{self.node}-{now * 1e3:.0f}"
            # Maintenance is told up to an hour before, and nothing says for when.
            left_s = {PREEMPTED: self.notice_s, SHUTDOWN: self.shutdown_s}.get(source)
            leaves_at = None if left_s is None else now + left_s
            self.feed(NoticeSeen(now, self.standing, leaves_at))
        elif self.standing is not None and self._all_stay():
            self.feed(NoticeWithdrawn(self.clock.now(), self.standing))
            self.standing = None

    def _all_stay(self) -> bool:
        """Whether every source was heard and none speaks of going."""
        return not any(self._said.get(source, True) for source in (PREEMPTED, MAINTENANCE)) and (
            not self._said.get(SHUTDOWN, False)
        )

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Hear the metadata server; for ever."""
        async with asyncio.TaskGroup() as group:
            for source in GOING:
                group.create_task(self._watch(session, source))

    async def _watch(self, session: aiohttp.ClientSession, source: str) -> None:
        async for value in follow(session, source):
            self.hear(source, is_going=value == GOING[source])
