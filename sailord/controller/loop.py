"""The controller's event loop: one event, one decision, and its commands handed on.

It decides nothing itself. Writes go to the store writer, which keeps their order; everything else
runs concurrently. What a rule waits for ends in another event.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from agents.daemon.clock import Clock
from agents.daemon.failpoints import failpoint
from agents.daemon.systemd import notify
from agents.protocol.records import JobId, Point, Report, ReportReply
from sailord.checkpoints.catalog import Checkpoints
from sailord.cluster_records import Gateway
from sailord.config import Config
from sailord.controller.agent_client import AgentClient
from sailord.controller.cluster_state import ClusterState
from sailord.controller.durations import Durations
from sailord.controller.effects import Effects
from sailord.controller.inbox import Inbox
from sailord.controller.release_cache import ReleaseCache
from sailord.controller.store_writer import StoreWriter, failpoint_of
from sailord.core.model.commands import Command, Note, Resign, Write
from sailord.core.model.events import Ticked
from sailord.core.model.state import State
from sailord.core.queries.report_reply import answer_to
from sailord.core.sharing.decide_parts import decide_parts
from sailord.core.sharing.parts import Parts, parts_then_and_now
from sailord.notify.announcer import Announcer
from sailord.notify.feed import Feed
from sailord.notify.outbox import Outbox
from sailord.notify.telemetry import TraceSender
from sailord.planning.messages import PoolPrice
from sailord.planning.pool import PlannerPool

log = structlog.get_logger("sailord")


@dataclass(eq=False)
class Controller:
    """One sailord's event loop with everything that carries out its commands."""

    clock: Clock
    cluster: ClusterState
    inbox: Inbox
    writer: StoreWriter
    effects: Effects
    announcer: Announcer
    durations: Durations = field(default_factory=Durations)
    resign_asked: asyncio.Event = field(default_factory=asyncio.Event)
    _releases: defaultdict[JobId | None, ReleaseCache] = field(
        default_factory=lambda: defaultdict(ReleaseCache)
    )
    """By the job of a part; ``None``: the first part."""

    async def run(self) -> None:
        """Decide forever; a violated invariant ends the process."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._decide_all())
            group.create_task(self.writer.run())
            group.create_task(self.announcer.run())
            group.create_task(self.announcer.outbox.run())
            group.create_task(self.announcer.telemetry.run())

    async def _decide_all(self) -> None:
        while True:
            since, event = await self.inbox.next_event()
            begun = time.monotonic()
            before, were = self.cluster.state, self.cluster.parts
            parts, commands = decide_parts(were, event)
            self.cluster.advance(parts)
            after = self.cluster.state
            if after.term != before.term:
                self.announcer.outbox.ring()
            done = time.monotonic()
            self.durations.decided(done - begun, waited_s=done - since)
            self.durations.count_election(before.term, after.term)
            for move in self.announcer.observe(before, after, parts_then_and_now(were, parts)):
                self.cluster.learn_moves([move])
                self.durations.moved(move)
            self.effects.precompute_losses()
            for command in commands:
                failpoint(*failpoint_of(command, after))
                self._carry_out(command, type(event).__name__)
            if isinstance(event, Ticked):
                # Fed by this loop itself, so that systemd restarts a stuck controller.
                notify("WATCHDOG=1")

    def _carry_out(self, command: Command, cause: str) -> None:
        state = self.cluster.state
        if isinstance(command, Write):
            assert state.term is not None
            self.writer.put(state.term, command)
        elif isinstance(command, Resign):
            log.warning("resigning", why=command.why, cause=cause)
            self.resign_asked.set()
        elif isinstance(command, Note):
            part = self.cluster.parts.of_job(command.job)
            self.announcer.note(command, part, cause, self.clock.now())
        else:
            self.effects.start(command, cause)

    def answer_to(self, report: Report) -> ReportReply:
        """The answer to an agent's report."""
        key, now = self.cluster.parts.key_of(report.node), time.monotonic()
        part = self.cluster.parts.of_job(key)
        return answer_to(part, report, self._releases[key].released(part, now))

    def safe_point(self, job: JobId | None = None) -> Point | None:
        """The newest point that survives the loss of any one node, or of a zone where asked.

        Of a job that runs; ``None``: of the active one, which has another part once the first part
        has no job.
        """
        active = self.cluster.state.active
        if job is None and active is not None:
            job = active.job
        key = job if job in self.cluster.parts.others else None
        return self._releases[key].safe(self.cluster.parts.of_job(key), time.monotonic())


def build_controller(
    config: Config,
    gateway: Gateway,
    clock: Clock,
    agents: AgentClient,
    *,
    keeps_deadline: Callable[[JobId], bool] = lambda _job: False,
    prices: Callable[[], tuple[PoolPrice, ...]] = tuple,
) -> Controller:
    """Build a controller that is not the leader yet.

    ``keeps_deadline``: whether instances are rented so that a job meets its deadline. ``prices``:
    what the provider charges.
    """
    cluster = ClusterState(Parts(State(options=config.options, now=clock.now())))
    inbox, outbox = Inbox(clock), Outbox(gateway)
    writer = StoreWriter(gateway, outbox, cluster, inbox, clock)
    effects = Effects(
        config,
        gateway,
        agents,
        PlannerPool(),
        Checkpoints(config.checkpoints),
        cluster,
        inbox,
        clock,
        writer.plans,
        keeps_deadline=keeps_deadline,
        prices=prices,
    )
    telemetry = TraceSender(config.otlp, config.cluster_name)
    announcer = Announcer(gateway, Feed(), outbox, telemetry, keeps_deadline)
    return Controller(clock, cluster, inbox, writer, effects, announcer)
