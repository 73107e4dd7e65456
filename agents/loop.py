"""Carries messages to the agent's decisions and from them, and decides nothing itself."""

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
    End,
    Event,
    JoinGeneration,
    KillGang,
    Note,
    RaiseIntent,
    Register,
    ReleaseHeard,
    ReleaseSnapshots,
    RoomSeen,
    SendReport,
    State,
    SweepJob,
    TellStop,
    Ticked,
)
from agents.daemon.clock import Clock
from agents.daemon.failpoints import reached
from agents.daemon.systemd import notify
from agents.protocol.records import Answer, JobId, Report
from agents.registration import Registration
from agents.report_sender import Teller
from agents.saved_state import Kept, keep, to_keep
from agents.snapshots.lifecycle import Keeper
from agents.workers.gang import Workers
from agents.workers.join import Joining
from agents.workers.status import Word

log = structlog.get_logger("sailor-agent")

TICK_S = 0.1
LOOK_TICKS = 10
"""So often a node without room for snapshots looks whether it has some now."""
START_S = 20
"""Before the start counts as failed; one that lives and waits for the store or a device goes on."""


@dataclass(eq=False)
class Shell:
    """One agent's state, and all that is on its way."""

    state: State
    kept: Kept
    path: Path
    clock: Clock
    events: asyncio.Queue[Event]
    registration: Registration
    workers: Workers
    joining: Joining
    keeper: Keeper
    teller: Teller
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """The agent may end: no worker needs it."""
    _is_ready: bool = False
    _tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    def __post_init__(self) -> None:
        self.workers.hear = self.hear
        self.teller.answered = self.answered
        self.keeper.state = lambda: self.state

    async def run(self) -> None:
        """Decide for ever."""
        async with self._tasks:
            self._start(self._tick())
            while True:
                event = await self.events.get()
                job = self.state.job
                self.state, commands = decide(self.state, event)
                if self.state.job is not None and self.state.job != job:
                    self.keeper.tell(self.state.job)
                kept = to_keep(self.kept, self.state)
                if kept != self.kept:
                    # Written before it is acted upon: whoever comes after us must know of it.
                    keep(self.path, kept)
                    self.kept = kept
                for command in commands:
                    generation = None if self.state.gang is None else self.state.gang.generation
                    reached(type(command).__name__, generation)
                    self._perform(command, type(event).__name__)
                self._tell_systemd(event)

    def _tell_systemd(self, event: Event) -> None:
        """Ready is who stands in the cluster. Fed by who decides, the watchdog sees one stuck."""
        if not self._is_ready and self.state.is_registered:
            self._is_ready = True
            notify("READY=1")
        if isinstance(event, Ticked):
            notify("WATCHDOG=1" if self._is_ready else f"EXTEND_TIMEOUT_USEC={START_S * 1e6:.0f}")

    def locate(self, address: str) -> None:
        """Say where others reach this agent; before it runs."""
        self.state = replace(self.state, node=replace(self.state.node, address=address))

    def held(self) -> JobId | None:
        """The job whose workers are here."""
        return self.state.job if self.state.gang is not None else None

    def answered(self, report: Report, answer: Answer) -> None:
        """A leader has taken a report, and said what it makes needless."""
        if answer.term is not None and answer.release is not None and report.job is not None:
            now = self.clock.now()
            release = ReleaseHeard(now, answer.term, report.job, answer.release)
            self.events.put_nowait(release)
        is_leader = answer.term is not None and answer.term >= self.state.heard.term
        if is_leader and answer.upload is not None and report.job is not None:
            self.keeper.secure(report.job, answer.upload)

    def hear(self, job: JobId, word: Word) -> None:
        """A worker may have opened a meeting, or sealed a snapshot."""
        self.keeper.hear(job, word)
        self.joining.hear(job, word)

    def _perform(self, command: Command, cause: str) -> None:
        match command:
            case Register():
                log.info(f"registering as {command.node.state}", cause=cause)
                self.registration.register(command.node)
            case JoinGeneration():
                self.workers.begin(command.record)
                self.keeper.begin()
                self._start(self.joining.join(command.record))
            case TellStop():
                order = {"order": "stop", "stop_at": command.stop_at}
                self.workers.order(command.generation, order)
            case AbortGang():
                log.info("telling the workers that their generation is over", cause=cause)
                self.workers.abort(command.generation)
            case KillGang():
                log.warning("killing the workers", cause=cause)
                self.workers.kill(command.generation)
            case ReleaseSnapshots():
                self.keeper.release(command.job, command.safe, command.running)
            case SweepJob():
                self.keeper.sweep(command.job)
            case SendReport():
                self.teller.tell(command.report)
            case RaiseIntent():
                about = {"intent": command.intent.id, "leaves_at": command.intent.leaves_at}
                log.warning(f"{command.intent.kind}: {command.intent.reason}", cause=cause, **about)
                self.registration.raise_intent(command.intent)
            case End():
                log.info("no worker needs the agent: it ends", cause=cause)
                self.ended.set()
            case Note():
                log.info(command.text, cause=cause)
            case _:
                assert_never(command)

    def standing(self) -> dict[str, object]:
        """Say what every line of the log is about."""
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
            if self.state.shortage is not None and ticks % LOOK_TICKS == 0:
                self.events.put_nowait(RoomSeen(self.clock.now(), self.keeper.free_bytes()))
            await asyncio.sleep(TICK_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(work)
