"""Notices: announcements that the instance will be stopped, from several sources.

The metadata server's preemption flag, its maintenance event and a shutdown of the system (SIGPWR,
``drain`` in ``agents.service``) may all announce the same departure. They share one notice, which
stands until every source has withdrawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import aiohttp

from agents.cloud.gce_metadata import follow
from agents.core.model import Event, NoticeGiven, NoticeWithdrawn
from agents.daemon.clock import Clock
from agents.protocol.records import NodeId

PREFIX = "going-"
PREEMPTED, MAINTENANCE, SHUTDOWN = "preempted", "maintenance-event", "shutdown"
LEAVING_VALUES = {PREEMPTED: "TRUE", MAINTENANCE: "TERMINATE_ON_HOST_MAINTENANCE"}
"""The metadata server's values that are notices; a live migration is not one."""


@dataclass(eq=False)
class Notices:
    """What each source has announced, and the notice that follows from it."""

    node: NodeId
    notice_s: float
    """From the preemption flag to the end of the instance."""
    shutdown_s: float
    """From the start of a shutdown to the end of the instance, which may be far less."""
    clock: Clock
    feed: Callable[[Event], None]
    present: str | None = None
    """The id of the notice that was given and not withdrawn."""
    _announced: dict[str, bool] = field(default_factory=dict)

    def restore(self, ids: Collection[str]) -> None:
        """Take over the notice of a previous agent process."""
        self.present = max((id_ for id_ in ids if id_.startswith(PREFIX)), default=None)

    def hear(self, source: str, *, is_leaving: bool) -> None:
        """Handle a source's value, changed or not."""
        is_news = self._announced.get(source) != is_leaving
        self._announced[source] = is_leaving
        if is_leaving and is_news:
            now = self.clock.now()
            if self.present is None:
                self.present = f"{PREFIX}{self.node}-{now * 1e3:.0f}"
            # Maintenance is announced up to an hour ahead, without its time.
            left_s = {PREEMPTED: self.notice_s, SHUTDOWN: self.shutdown_s}.get(source)
            leaves_at = None if left_s is None else now + left_s
            self.feed(NoticeGiven(now, self.present, leaves_at))
        elif self.present is not None and self._all_withdrew():
            self.feed(NoticeWithdrawn(self.clock.now(), self.present))
            self.present = None

    def _all_withdrew(self) -> bool:
        """Return whether the metadata server was read, and no source announces a departure."""
        sources = {PREEMPTED: True, MAINTENANCE: True, SHUTDOWN: False}
        return not any(self._announced.get(source, unread) for source, unread in sources.items())

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Follow the metadata server, forever."""
        async with asyncio.TaskGroup() as group:
            for source in LEAVING_VALUES:
                group.create_task(self._watch(session, source))

    async def _watch(self, session: aiohttp.ClientSession, source: str) -> None:
        async for value in follow(session, source):
            self.hear(source, is_leaving=value == LEAVING_VALUES[source])
