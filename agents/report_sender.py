"""Sends the node's reports to the leader: always the newest one, with retries."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

from agents.daemon.backoff import Backoff
from agents.daemon.unreadable import UnreadableRecords
from agents.last_answer import LastAnswer
from agents.protocol.codec import WireError, decode, encode
from agents.protocol.records import NodeMeasurements, Report, ReportReply
from agents.rpc.client import CallFailed, SignedClient

PATH = "/v1/agents/report"
RETRY_S = 0.2
RETRY_S_MAX = 1.0
"""The longest pause between attempts until a leader has set the interval of routine reports."""
OFTEN_S = 0.5
"""With routine reports at least this often, each sealed snapshot is reported at once."""

MEASURED_EACH_STEP = [
    each.name
    for each in fields(NodeMeasurements)
    if each.name not in ("phases", "evaluation", "earlier_evaluations", "unlogged")
]


@dataclass(eq=False)
class ReportSender:
    """Sends a changed report at once, and routine ones at the interval that the leader sets.

    A report is complete, so that one that was superseded need not arrive.
    """

    client: SignedClient
    leader: Callable[[], str | None]
    last_answer: LastAnswer = field(default_factory=LastAnswer)
    """When a sailord last answered, whatever the answer."""
    unreadable: UnreadableRecords = field(default_factory=UnreadableRecords)
    answered: Callable[[Report, ReportReply], None] = lambda *_: None
    _newest: Report | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _delivered: Report | None = None
    """The last report that a leader received."""
    _delivered_s: float = 0.0
    _every_s: float = 0.0

    def send(self, report: Report) -> None:
        """Make this the report to send; a routine one waits until the interval has passed."""
        self._newest = report
        is_due = time.monotonic() >= self._delivered_s + self._every_s
        if is_due or is_worth_sending(report, self._delivered, with_seals=self._every_s <= OFTEN_S):
            self._changed.set()

    async def run(self) -> None:
        """Send reports, forever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            report = self._newest
            assert report is not None
            # With few agents retries are quick, and a new leader soon knows the job's progress.
            backoff = Backoff(RETRY_S, max(RETRY_S, self._every_s or RETRY_S_MAX))
            while not await self._deliver(report) and not self._changed.is_set():
                # Jitter: thousands of agents must not retry at the same moment.
                await asyncio.sleep(backoff.next_s() * random.uniform(0.5, 1.0))

    async def _deliver(self, report: Report) -> bool:
        leader = self.leader()
        if leader is None:
            return False
        try:
            status, body = await self.client.call(
                leader, "POST", PATH, encode(report), to="sailord"
            )
        except CallFailed:
            return False
        self.last_answer.note()
        if status == 422:
            self.unreadable.note(f"{leader}{PATH}", body.decode(errors="replace").strip())
        if status != 200:
            return False
        self._delivered, self._delivered_s = report, time.monotonic()
        try:
            reply = decode(ReportReply, body)
        except WireError as error:
            self.unreadable.note(f"{leader}{PATH}", str(error))
            return True
        self.unreadable.clear(f"{leader}{PATH}")
        self._every_s = reply.every_s
        self.answered(report, reply)
        return True


def is_worth_sending(report: Report, delivered: Report | None, *, with_seals: bool = True) -> bool:
    """Return whether more has changed than what changes with each step.

    Without ``with_seals`` a sealed snapshot of a running generation is no news.
    """
    if delivered is None:
        return True
    is_running = report.taking == delivered.taking == "running"
    return delivered != replace(
        report,
        sealed=delivered.sealed if is_running and not with_seals else report.sealed,
        number=delivered.number,
        step=delivered.step,
        **{name: getattr(delivered, name) for name in MEASURED_EACH_STEP},
    )
