"""The agent's event loop: passes events to ``decide`` and carries out its commands."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, assert_never

import structlog

from agents.core.decide import decide
from agents.core.model import (
    AbortGang,
    Command,
    DeleteJobSnapshots,
    Event,
    Exit,
    FreeMemoryMeasured,
    JoinGeneration,
    KillGang,
    Note,
    Register,
    ReleaseReceived,
    ReleaseSnapshots,
    SendReport,
    SendStop,
    State,
    StoreOrder,
    Ticked,
)
from agents.daemon.clock import Clock
from agents.daemon.error_text import describe_error
from agents.daemon.failpoints import failpoint
from agents.daemon.systemd import notify
from agents.protocol.records import JobId, KnownGeneration, Order, Report, ReportReply
from agents.registration import Registration
from agents.report_sender import ReportSender
from agents.saved_state import SavedState, save, updated
from agents.snapshots.lifecycle import SnapshotLifecycle
from agents.workers.gang import WorkerGang
from agents.workers.join import GenerationJoiner
from agents.workers.specs import read_known_generation
from agents.workers.status import WorkerStatus

log = structlog.get_logger("sailor-agent")

TICK_S = 0.1
MEASURE_TICKS = 10
"""Ticks between two measurements of free memory, while a node lacks room for snapshots."""
SAVE_AGAIN_S = 1.0
"""Between two attempts to save the state on a full disk."""
START_S = 20
"""Until the node is registered, each tick extends systemd's start timeout to this time from now."""


def describe(state: State) -> str:
    """Say in one line what the node does, or waits for."""
    gang = state.gang
    work = "no worker" if gang is None else f"generation {gang.generation} of {state.job}"
    trouble = "; the store does not answer" if state.store_silent_since is not None else ""
    if state.is_leaving:
        return f"draining, ends when no worker is needed: {work} runs here{trouble}"
    if not state.is_healthy:
        return f"not ready: {state.why_not or state.fault or 'its devices are tested'}{trouble}"
    if not state.is_registered:
        return f"not ready: it is not registered yet{trouble}"
    before = "" if state.node.state == "ready" else f"{state.node.state}, "
    doing = "ready for work" if gang is None else f"{gang.taking}: {work}"
    return f"{before}{doing}{trouble}"


@dataclass(eq=False)
class CurrentState:
    """The agent's present state: the loop replaces it, all other parts read it."""

    state: State


@dataclass(eq=False, kw_only=True)
class AgentLoop:
    """The agent's state and all parts that its commands need."""

    current: CurrentState
    saved: SavedState
    path: Path
    """The file of ``saved``."""
    clock: Clock
    events: asyncio.Queue[Event]
    registration: Registration
    gang: WorkerGang
    joiner: GenerationJoiner
    snapshots: SnapshotLifecycle
    sender: ReportSender
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """The agent may end: no worker needs it."""
    _is_ready: bool = False
    _unsaved: str = ""
    """Why the state could not be saved; empty: it could."""
    _status: str = ""
    """The line that `systemctl status` shows."""
    _tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    def __post_init__(self) -> None:
        self.gang.hear = self.hear
        self.sender.answered = self.answered

    @property
    def state(self) -> State:
        return self.current.state

    async def run(self) -> None:
        """Handle events, forever."""
        async with self._tasks:
            self._start(self._tick())
            while True:
                event = await self.events.get()
                job = self.state.job
                self.current.state, commands = decide(self.state, event)
                if self.state.job is not None and self.state.job != job:
                    self.snapshots.report(self.state.job)
                saved = updated(self.saved, self.state)
                if saved != self.saved:
                    await self._save(saved)
                for command in commands:
                    generation = None if self.state.gang is None else self.state.gang.generation
                    failpoint(type(command).__name__, generation)
                    self._perform(command, type(event).__name__)
                self._notify_systemd(event)

    async def _save(self, saved: SavedState) -> None:
        """Save the state before any command is carried out: a restarted agent must know it.

        Without room on the disk it waits: workers train on, and the node stays registered.
        """
        while True:
            try:
                save(self.path, saved)
            except OSError as error:
                why = describe_error(error, self.path)
                if why != self._unsaved:
                    log.error("the node's state cannot be saved", why=why)
                    self._unsaved = why
            else:
                self.saved, self._unsaved = saved, ""
                return
            if replace(saved, uploaded=self.saved.uploaded) == self.saved:
                return  # The next agent process would upload it again.
            notify(f"STATUS={self._unsaved}\nWATCHDOG=1")
            self._status = ""
            await asyncio.sleep(SAVE_AGAIN_S)

    def _notify_systemd(self, event: Event) -> None:
        """Send READY once registered; feed the watchdog from here, so that a stuck loop is seen."""
        if not self._is_ready and self.state.is_registered:
            self._is_ready = True
            notify("READY=1")
        status = describe(self.state)
        if status != self._status:
            self._status = status
            notify(f"STATUS={status}")
        if isinstance(event, Ticked):
            notify("WATCHDOG=1" if self._is_ready else f"EXTEND_TIMEOUT_USEC={START_S * 1e6:.0f}")

    def held_job(self) -> JobId | None:
        """Return the job whose workers run on this node."""
        return self.state.job if self.state.gang is not None else None

    def known_generation(self) -> KnownGeneration | None:
        """Return what this node knows of its job's newest generation."""
        state, settings = self.state, self.joiner.settings
        numbers = {state.heard.generation, state.left, state.gang.generation if state.gang else 0}
        found = (read_known_generation(settings, number) for number in sorted(numbers)[::-1])
        known = next((each for each in found if each and each.record.job == state.job), None)
        if known is None:
            return None
        record = state.record
        if record is not None and (record.job, record.number) == (
            known.record.job,
            known.record.number,
        ):
            known = replace(known, record=record)
        return replace(
            known, durable=self.registration.durables.get(known.record.job, known.durable)
        )

    def answered(self, report: Report, reply: ReportReply) -> None:
        """Handle a leader's reply: what to release, and what to upload now."""
        if reply.term is not None and reply.release is not None and report.job is not None:
            now = self.clock.now()
            self.events.put_nowait(ReleaseReceived(now, reply.term, report.job, reply.release))
        is_leader = reply.term is not None and reply.term >= self.state.heard.term
        if is_leader and reply.upload is not None and report.job is not None:
            self.snapshots.upload_now(report.job, reply.upload)

    def hear(self, job: JobId, status: WorkerStatus) -> None:
        """Handle what a worker's status says of its snapshots and of the rendezvous."""
        self.snapshots.hear(
            job,
            status.rank,
            sealed_at=status.sealed_at,
            bytes_short=status.room_short,
            complete=status.complete,
        )
        if status.withdrew:
            self.snapshots.withdrawn(job, status.rank)
        self.joiner.hear(job, status)

    def _perform(self, command: Command, cause: str) -> None:
        match command:
            case Register():
                log.info("registering", state=command.node.state, cause=cause)
                self.registration.register(command.node)
            case JoinGeneration():
                self.gang.begin(command.record)
                self.snapshots.begin()
                self._start(self.joiner.join(command.record))
            case SendStop():
                order = {"order": "stop", "stop_at": command.stop_at}
                self.gang.order(command.generation, order)
            case AbortGang():
                log.info("aborting the workers' generation", cause=cause)
                self.gang.abort(command.generation)
            case KillGang():
                log.warning("killing the workers", cause=cause)
                self.gang.kill(command.generation)
            case ReleaseSnapshots():
                self.snapshots.release(command.job, command.safe, command.running)
            case DeleteJobSnapshots():
                self.snapshots.delete_job(command.job)
            case SendReport():
                self.sender.send(command.report)
            case StoreOrder():
                self._log_order(command.order, cause)
                self.registration.store_order(command.order)
            case Exit():
                log.info("no worker needs the agent: exiting", cause=cause)
                self.ended.set()
            case Note():
                log.info(command.text, cause=cause)
            case _:
                assert_never(command)

    def _log_order(self, order: Order, cause: str) -> None:
        about = {"order": order.id, "kind": order.kind, "reason": order.reason}
        log.warning("storing an order", **about, leaves_at=order.leaves_at, cause=cause)

    def log_context(self) -> dict[str, object]:
        """Return the fields of each log line."""
        state, gang = self.state, self.state.gang
        return {
            "job": state.job,
            "generation": None if gang is None else gang.generation,
            "term": state.heard.term,
            "step": None if gang is None else gang.step,
            "node": state.node.id,
        }

    async def _tick(self) -> None:
        for ticks in itertools.count():
            self.events.put_nowait(Ticked(self.clock.now()))
            if self.state.shortage is not None and ticks % MEASURE_TICKS == 0:
                free_bytes = self.snapshots.free_bytes()
                self.events.put_nowait(FreeMemoryMeasured(self.clock.now(), free_bytes))
            await asyncio.sleep(TICK_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(work)
