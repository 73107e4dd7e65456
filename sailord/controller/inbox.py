"""The queue of events that wait for a decision; reports of agents are batched."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from agents.daemon.clock import Clock
from agents.protocol.records import NodeId, Report
from sailord.core.model.events import Event, Reported

BATCH_S = 0.02
"""Reports that arrive within this time are decided on together."""


@dataclass(eq=False)
class Inbox:
    """Events in order of arrival, each with the monotonic time of its arrival."""

    clock: Clock
    _events: asyncio.Queue[tuple[float, Event]] = field(default_factory=asyncio.Queue)
    _reports: dict[NodeId, Report] = field(default_factory=dict)
    """The newest report of each node in the present batch."""

    def put(self, event: Event) -> None:
        """Add an event."""
        self._events.put_nowait((time.monotonic(), event))

    def put_report(self, report: Report) -> None:
        """Add an agent's report to the present batch."""
        if not self._reports:
            since = time.monotonic()
            asyncio.get_running_loop().call_later(BATCH_S, self._put_batch, since)
        known = self._reports.get(report.node)
        if known is None or known.number < report.number:
            self._reports[report.node] = report

    def _put_batch(self, since: float) -> None:
        first, *others = self._reports.values()
        self._reports.clear()
        self._events.put_nowait((since, Reported(self.clock.now(), first, tuple(others))))

    async def next_event(self) -> tuple[float, Event]:
        """Wait for the next event."""
        return await self._events.get()
