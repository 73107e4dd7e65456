"""This node's workers: begun, taken over into the next generation, found again, ended.

A worker connects to the agent's Unix socket and writes what it does as lines of JSON
(``agents.workers.status``). The agent writes orders, each with the ``generation`` that it is for:
``{"order": "join", "spec": {...}}`` to one that is idle, ``{"order": "meet", "address": ...}``,
``{"order": "stop", "stop_at": N}``, ``{"order": "replicated", "point": {...}}`` and
``{"order": "abort"}``. They are said again to a worker that connects again, so that the same
order may come twice. When the agent is gone, a worker goes on and connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.core.model import Event, GangExited, GangReported
from agents.daemon.clock import Clock
from agents.daemon.tasks import Tasks
from agents.protocol.codec import WireError, read
from agents.protocol.records import GenerationRecord, JobId
from agents.workers.fork_client import WarmParent
from agents.workers.pidfd import ProcessId, watch
from agents.workers.process import Member, how_it_ended, is_bug, join_order, wait_written, write
from agents.workers.status import Word, sum_up

IDLE_S = 60.0
"""Workers without a generation end after so long; the next ones are forked."""
LINE_BYTES_MAX = 1 << 20
SPEAKER_TRIES = 50
WARM_S = 60.0
ENDED_KEPT = 8
"""So many processes that have ended keep their folders, for those who read logs."""


@dataclass(eq=False)
class Workers:
    """All worker processes of this node; those of the present generation are the gang."""

    folder: Path
    warm: WarmParent
    clock: Clock
    feed: Callable[[Event], None]
    hear: Callable[[JobId, Word], None] = lambda *_: None
    """Told of what concerns others: a snapshot is sealed, a meeting is open."""
    ended: Callable[[], None] = lambda: None
    """Told when a process is gone."""
    job: JobId | None = None
    generation: int = 0
    members: list[Member] = field(default_factory=list)
    outputs: dict[int, Path] = field(default_factory=dict)
    """Where each rank of the present generation writes what it prints."""
    _place: str = ""
    """Where the ranks of the present generation meet, once that is known."""
    _failure: str = ""
    _is_bug: bool = False
    _room_needed: int = 0
    _is_starting: bool = False
    _is_over: bool = False
    """The generation was aborted or left: nothing more is begun for it."""
    _tasks: Tasks = field(default_factory=Tasks)
    _server: asyncio.Server | None = None
    _idle: asyncio.TimerHandle | None = None

    # ---- finding again --------------------------------------------------------------------------

    async def open(self, job: JobId | None, generation: int, count: int) -> None:
        """Listen, and take back the workers that an agent before us had."""
        self.job, self.generation = job, generation
        path = self.folder / "workers.sock"
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._hear, path, limit=LINE_BYTES_MAX)
        path.chmod(0o600)
        await self.warm.settle()
        for home in sorted(self.folder.glob("process/*")):
            with contextlib.suppress(OSError, ValueError):
                self._adopt(home)
        found = len(list(self._gang()))
        if generation and not found:
            self._exited("the workers were gone when the agent came back")
        elif generation and found < count:
            self._fail("some workers were gone when the agent came back")
        if generation:
            await self._make_room()
        else:
            self._end_idle_later()
        self._tasks.start(self._keep_warm())

    def _adopt(self, home: Path) -> None:
        born = json.loads((home / "process.json").read_text(encoding="utf-8"))
        spec, is_seated = born, (home / "seat.json").exists()
        if is_seated:
            spec = json.loads((home / "seat.json").read_text(encoding="utf-8"))
        member = self._take(home, ProcessId(born["pid"], born["start"]), spec)
        if member is not None and is_seated:
            member.orders["join"] = join_order(spec)  # It may not have heard of its new seat.

    async def _keep_warm(self) -> None:
        """Let the warm parent know that an agent is here, and have another if it died."""
        while True:
            with contextlib.suppress(OSError):  # Whoever needs it says that it is not there.
                await self.warm.up()
            await asyncio.sleep(min(WARM_S, self.warm.orphan_s / 3))

    # ---- beginning ------------------------------------------------------------------------------

    def begin(self, record: GenerationRecord) -> None:
        """From now on this is the present generation; ``start`` follows."""
        self.job, self.generation = record.job, record.number
        self._place, self._failure, self._is_bug, self._room_needed = "", "", False, 0
        self._is_starting, self._is_over = True, False
        self.outputs.clear()
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    async def start(self, specs: list[dict[str, Any]]) -> None:
        """Give each seat to a process: one that lives, idle, on its device, or a new one."""
        # Generations are counted within a job: one of another job would mistake ours for its own.
        idlers = {
            member.device: member
            for member in self.members
            if member.is_idle() and member.spec["job"] == self.job
        }
        missing = []
        for spec in specs:
            if (member := idlers.get(spec["device"])) is not None:
                self._seat(member, spec)
            else:
                missing.append(spec)
        try:
            await self._make_room()
            for spec in missing:
                await self.warm.up()
                if self._is_over:
                    break
                await self._fork(spec)
        except (OSError, ValueError) as error:
            self._fail(f"the workers cannot be started: {error}")
        self._is_starting = False
        self._look()

    def refuse(self, failure: str) -> None:
        """Nothing can be started for the present generation."""
        self._is_starting = False
        self._exited(failure)

    async def _make_room(self) -> None:
        """End all processes that got no seat; their devices are free once they have ended."""
        gang = list(self._gang())
        over = [member for member in self.members if member not in gang]
        for member in over:
            member.let_go()
        while any(member in self.members for member in over):
            await asyncio.sleep(0.005)
        self._forget_ended()

    def _seat(self, member: Member, spec: dict[str, Any]) -> None:
        early = member.home / "seat.new"
        early.write_text(json.dumps(spec), encoding="utf-8")
        early.rename(member.home / "seat.json")  # On record before it hears of it.
        member.spec = spec
        member.orders.clear()
        self.outputs[member.rank] = member.home / "output"
        member.tell(join_order(spec))

    async def _fork(self, spec: dict[str, Any]) -> None:
        home = self.folder / "process" / f"{spec['job']}.{spec['generation']}.{spec['rank']}"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        id_ = await self.warm.fork(home, spec)
        if self._take(home, id_, spec) is None:
            self._fail(f"rank {spec['rank']} {how_it_ended(home)}", is_bug=is_bug(home))

    def _take(self, home: Path, id_: ProcessId, spec: Mapping[str, Any]) -> Member | None:
        if (spec["job"], spec["generation"]) == (self.job, self.generation):
            self.outputs[spec["rank"]] = home / "output"
        process = watch(id_)
        if process is None:
            return None
        member = Member(home, process, spec)
        self.members.append(member)
        self._tasks.start(self._wait_end(member))
        return member

    def _forget_ended(self) -> None:
        living = {member.home for member in self.members}
        homes = [home for home in self.folder.glob("process/*") if home not in living]
        homes.sort(key=lambda home: home.stat().st_mtime)
        for home in homes[:-ENDED_KEPT]:
            shutil.rmtree(home, ignore_errors=True)

    # ---- hearing --------------------------------------------------------------------------------

    def _gang(self) -> Iterator[Member]:
        """Those that live and are seated in the present generation."""
        seat = (self.job, self.generation)
        return (
            member
            for member in self.members
            if not member.is_let_go and (member.spec["job"], member.spec["generation"]) == seat
        )

    def spec(self) -> Mapping[str, Any] | None:
        """What a member of the gang was told."""
        return next((member.spec for member in self._gang()), None)

    async def _hear(self, lines: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member = await self._speaker(writer)
        try:
            while member is not None and (line := await lines.readline()):
                word = read(Word, json.loads(line))
                if member.line is not writer:
                    member.line = writer
                    for order in member.orders.values():
                        write(writer, order)
                self._take_word(member, word)
        except (OSError, ValueError, WireError):
            pass  # It connects again, if it is still one of ours.
        finally:
            if member is not None and member.line is writer:
                member.line = None
            writer.close()

    async def _speaker(self, writer: asyncio.StreamWriter) -> Member | None:
        """Whose line it is: the kernel says which process is at its other end."""
        raw = writer.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        pid = struct.unpack("3i", raw)[0]
        for _ in range(SPEAKER_TRIES):
            member = next((m for m in self.members if m.process.id.pid == pid), None)
            if member is not None:
                return member
            await asyncio.sleep(0.01)  # It may speak before we have heard that it was born.
        return None

    def _take_word(self, member: Member, word: Word) -> None:
        member.word = word
        if member.own_word() is None:
            return  # It has not yet heard of its new seat.
        member.orders.pop("join", None)
        self.hear(JobId(member.spec["job"]), word)
        if member.is_let_go or member not in self._gang():
            return
        if self._place and "meet" not in member.orders:
            member.tell(self._meet())
        if word.taking == "failed":
            self._room_needed = max(self._room_needed, word.room_needed)
            self._fail(f"rank {word.rank}: {word.failure}", is_bug=word.is_bug)
        self._look()

    def _look(self) -> None:
        """Say how the gang stands, once all of it has spoken."""
        gang = list(self._gang())
        words = [word for member in gang if (word := member.own_word()) is not None]
        if self._is_starting or not self.generation:
            return
        if not gang:
            self._exited(self._failure or "the workers ended as they began")
        elif len(words) == len(gang):
            self._report(words)

    def _report(self, words: list[Word]) -> None:
        summary = sum_up(words)
        if any(word.taking == "failed" for word in words):
            return
        if summary.taking == "idle":
            self._is_over = True
            self._end_idle_later()
        self.feed(
            GangReported(
                self.clock.now(),
                self.generation,
                summary.taking,
                summary.step,
                summary.broken_peers,
                measured=summary.measured,
            )
        )

    async def _wait_end(self, member: Member) -> None:
        await member.process.wait_ended()
        # What it had started itself is of no use alone, and may hold the device.
        member.process.kill_group()
        await wait_written(member.home)
        is_ours = member in self._gang() and not self._is_over
        self.members.remove(member)
        member.process.close()
        self.ended()
        if is_ours:
            failure = f"rank {member.rank} {how_it_ended(member.home)}"
            self._fail(failure, is_bug=is_bug(member.home))
        if not member.is_let_go:
            self._look()

    def _fail(self, failure: str, *, is_bug: bool = False) -> None:
        if not self._failure:
            self._failure, self._is_bug = failure, is_bug
        now, said = self.clock.now(), (self._failure, self._is_bug)
        self.feed(
            GangReported(
                now, self.generation, "failed", 0, (), *said, room_needed=self._room_needed
            )
        )

    def _exited(self, failure: str) -> None:
        self._is_over = True
        self.feed(GangExited(self.clock.now(), self.generation, failure, self._is_bug))

    # ---- ordering -------------------------------------------------------------------------------

    def meet(self, generation: int, place: str) -> None:
        """Say where the ranks of the generation meet, to those who speak and who will."""
        if generation == self.generation and place != self._place:
            self._place = place
            for member in self._gang():
                member.tell(self._meet())

    def _meet(self) -> dict[str, Any]:
        return {"order": "meet", "generation": self.generation, "address": self._place}

    def order(self, generation: int, order: dict[str, Any], *, rank: int | None = None) -> None:
        """Say something to all workers of the generation, or to one of its ranks."""
        if generation != self.generation:
            return
        for member in self._gang():
            if rank in {None, member.rank}:
                member.tell({**order, "generation": generation})

    def abort(self, generation: int) -> None:
        """Say that the generation is over."""
        if generation == self.generation:
            self._is_over = self._is_over or self._is_starting
        self.order(generation, {"order": "abort"})

    def kill(self, generation: int) -> None:
        """End by force what has not left the generation."""
        if generation != self.generation:
            return
        self._is_over = self._is_over or self._is_starting
        for member in self._gang():
            if not member.is_idle():
                member.process.kill_group()
        self._look()

    def _end_idle_later(self) -> None:
        if self._idle is None:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self.end_idle)

    def end_idle(self) -> None:
        """End all processes; none of them has a generation any more."""
        for member in self.members:
            member.let_go()

    async def close(self, *, is_over: bool) -> None:
        """Listen no more; ``is_over``: this life ends, its processes and the warm parent too."""
        if self._server is not None:
            self._server.close()
        self._tasks.cancel()
        if is_over:
            self.end_idle()
            await self.warm.end()
