"""Carries messages to the agent's decisions and from them, and decides nothing itself."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, assert_never

import structlog

from agents.clock import Clock
from agents.decide import decide
from agents.model import (
    AbortGang,
    Command,
    End,
    Event,
    JoinGeneration,
    KillGang,
    Note,
    RaiseIntent,
    Register,
    SendReport,
    State,
    TellStop,
    Ticked,
)
from agents.protocol import GenerationRecord, JobId
from agents.recall import Kept, keep, to_keep
from agents.registration import Registration
from agents.telling import Teller
from agents.workers import Workers

log = structlog.get_logger("sailor-agent")

TICK_S = 0.1


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
    teller: Teller
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """The agent may end: no worker needs it."""
    _tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    async def run(self) -> None:
        """Decide for ever."""
        async with self._tasks:
            self._start(self._tick())
            while True:
                event = await self.events.get()
                self.state, commands = decide(self.state, event)
                kept = to_keep(self.kept, self.state)
                if kept != self.kept:
                    # Written before it is acted upon: whoever comes after us must know of it.
                    keep(self.path, kept)
                    self.kept = kept
                for command in commands:
                    self._perform(command, type(event).__name__)

    def locate(self, address: str) -> None:
        """Say where others reach this agent; before it runs."""
        self.state = replace(self.state, node=replace(self.state.node, address=address))

    def held(self) -> JobId | None:
        """The job whose workers are here."""
        return self.state.job if self.state.gang is not None else None

    def _perform(self, command: Command, cause: str) -> None:
        match command:
            case Register():
                self.registration.register(command.node)
            case JoinGeneration():
                self._start(self._join(command.record))
            case TellStop():
                self.workers.tell_stop(command.generation, command.stop_at)
            case AbortGang():
                self.workers.abort(command.generation)
            case KillGang():
                self.workers.kill(command.generation)
            case SendReport():
                self.teller.tell(command.report)
            case RaiseIntent():
                self._start(self.registration.raise_intent(command.intent))
            case End():
                self.ended.set()
            case Note():
                self._log(command.text, cause)
            case _:
                assert_never(command)

    async def _join(self, record: GenerationRecord) -> None:
        await self.workers.start(record, await self.registration.read_plan(record))

    def _log(self, text: str, cause: str) -> None:
        gang, heard = self.state.gang, self.state.heard
        log.info(
            text,
            job=self.state.job,
            generation=None if gang is None else gang.generation,
            term=heard.term,
            step=None if gang is None else gang.step,
            node=self.state.node.id,
            cause=cause,
        )

    async def _tick(self) -> None:
        while True:
            # Fed by the loop that decides, so that one which is stuck is started anew.
            notify("WATCHDOG=1")
            self.events.put_nowait(Ticked(self.clock.now()))
            await asyncio.sleep(TICK_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(work)


def notify(text: str) -> None:
    """Tell systemd how the service stands; without systemd, nobody."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
        out.setblocking(False)
        try:
            out.sendto(text.encode(), address)
        except OSError:
            return  # It hears the next one; a loop must not end for that.
