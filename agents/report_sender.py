"""Tells the leader how the node stands: always the newest report, until it was heard."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from agents.protocol.codec import WireError, decode, encode
from agents.protocol.records import Answer, Report
from agents.rpc.client import CallFailed, Peers

PATH = "/v1/agents/report"
RETRY_S = 0.2
RETRY_S_MAX = 1.0
"""The longest pause between tries, until a leader has said how often it wishes to be told."""
OFTEN_S = 0.5
"""A leader that hears each agent so often hears of each snapshot as it is sealed."""


@dataclass(eq=False)
class Teller:
    """A report that was overtaken need not arrive: each says everything.

    What is news is told at once. That steps go on is told as often as the leader wishes, since
    thousands tell it; so is what they sealed, where the leader wishes to hear seldom.
    """

    peers: Peers
    leader: Callable[[], str | None]
    answered: Callable[[Report, Answer], None] = lambda *_: None
    _newest: Report | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _heard: Report | None = None
    """The last that a leader heard."""
    _heard_s: float = 0.0
    _every_s: float = 0.0

    def tell(self, report: Report) -> None:
        """Let this be the report that is told."""
        self._newest = report
        is_due = time.monotonic() >= self._heard_s + self._every_s
        if is_due or is_news(report, self._heard, with_seals=self._every_s <= OFTEN_S):
            self._changed.set()

    async def run(self) -> None:
        """Tell, for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            report = self._newest
            assert report is not None
            retry_s = RETRY_S
            while not await self._send(report) and not self._changed.is_set():
                # Thousands that tried again at one moment would keep a leader from its feet.
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
                # Where they are few, the next leader soon knows how far the job is.
                most_s = max(RETRY_S, self._every_s) if self._every_s else RETRY_S_MAX
                retry_s = min(2 * retry_s, most_s)

    async def _send(self, report: Report) -> bool:
        leader = self.leader()
        if leader is None:
            return False
        try:
            status, body = await self.peers.call(leader, "POST", PATH, encode(report))
            if status == 200:
                answer = decode(Answer, body)
                self._heard, self._heard_s = report, time.monotonic()
                self._every_s = answer.every_s
                self.answered(report, answer)
        except (CallFailed, WireError):
            return False
        return status == 200


def is_news(report: Report, heard: Report | None, *, with_seals: bool = True) -> bool:
    """More has changed than what changes with each step."""
    if heard is None:
        return True
    is_running = report.taking == heard.taking == "running"
    return heard != replace(
        report,
        sealed=heard.sealed if is_running and not with_seals else report.sealed,
        number=heard.number,
        step=heard.step,
        loss=heard.loss,
        tokens_per_s=heard.tokens_per_s,
        stall_s=heard.stall_s,
        late_s=heard.late_s,
        settle_s=heard.settle_s,
        busy=heard.busy,
    )
