"""This node's workers: started from the warm parent, heard over a socket, found again, ended.

A worker connects to the agent's Unix socket and writes what it does as lines of JSON: its
generation and rank, ``taking`` and ``step`` as in a report, and if it has them ``sealed``,
``broken_peers``, ``failure`` and ``is_bug``. The agent writes orders: ``{"order": "stop",
"stop_at": N}`` and ``{"order": "abort"}``. When the agent is gone, the worker goes on and
connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.clock import Clock
from agents.model import Event, GangExited, GangReported, SnapshotsChanged
from agents.processes import ProcessId, Watched, watch
from agents.protocol import GenerationRecord, NodeId, Sealed, Taking
from agents.wire import WireError, read

NURSERY_S = 120.0
"""For the warm parent to import what workers need."""
EXIT_WRITTEN_S = 0.5
LINE_BYTES_MAX = 16 << 20
ORDER: tuple[Taking, ...] = ("fetching", "rebuilding", "verifying", "running", "stopped")


@dataclass(frozen=True, slots=True)
class Word:
    """What one worker says of itself, in full."""

    generation: int
    rank: int
    taking: Taking
    step: int = 0
    sealed: tuple[Sealed, ...] = ()
    broken_peers: tuple[NodeId, ...] = ()
    failure: str = ""
    is_bug: bool = False


@dataclass(eq=False)
class Member:
    """One worker process."""

    rank: int
    folder: Path
    process: Watched
    word: Word | None = None
    line: asyncio.StreamWriter | None = None
    has_ended: bool = False


@dataclass(eq=False)
class Workers:
    """The workers of one generation, or none."""

    folder: Path
    module: str
    count: int
    orphan_s: float
    clock: Clock
    feed: Callable[[Event], None]
    generation: int = 0
    members: dict[int, Member] = field(default_factory=dict)
    failure: str = ""
    is_bug: bool = False
    _orders: list[dict[str, Any]] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None

    # ---- beginning and finding again ------------------------------------------------------------

    async def open(self, generation: int) -> None:
        """Listen, and take back the workers of a generation that an agent before us had."""
        path = self.folder / "workers.sock"
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._hear, path, limit=LINE_BYTES_MAX)
        path.chmod(0o600)
        if generation:
            self.generation = generation
            with contextlib.suppress(OSError):
                # Whatever a dead agent asked for is done before this is answered.
                await self._ask({"ask": "sync"})
            self._adopt()

    def _adopt(self) -> None:
        for path in sorted(self._home().glob("*/process.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            self._take(record["rank"], path.parent, ProcessId(record["pid"], record["start"]))
        if not self.members:
            self._exited("the workers were gone when the agent came back")
        elif len(self.members) < self.count:
            self._fail("some workers were gone when the agent came back")

    async def start(self, record: GenerationRecord, plan: str | None) -> None:
        """Fork one worker for each device."""
        self.generation, self.failure, self.is_bug = record.number, "", False
        self._orders.clear()
        home = self._home()
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        if plan is not None:
            (home / "plan.json").write_text(plan, encoding="utf-8")
        try:
            await self._warm()
            for rank in range(self.count):
                folder = home / str(rank)
                folder.mkdir()
                spec = self._spec(record, rank, folder)
                await self._ask({"ask": "fork", "folder": str(folder), "spec": spec})
                born = json.loads((folder / "process.json").read_text(encoding="utf-8"))
                self._take(rank, folder, ProcessId(born["pid"], born["start"]))
        except (OSError, ValueError) as error:
            self._fail(f"the workers cannot be started: {error}")
        if not self.members:
            self._exited(self.failure or "the workers ended as they began")

    def _spec(self, record: GenerationRecord, rank: int, folder: Path) -> dict[str, Any]:
        return {
            "generation": record.number,
            "rank": rank,
            "workers": self.count,
            "step": record.restore.point.step,
            "folder": str(folder),
            "socket": str(self.folder / "workers.sock"),
            "orphan_s": self.orphan_s,
        }

    def _take(self, rank: int, folder: Path, id_: ProcessId) -> None:
        process = watch(id_)
        if process is None:
            self._fail(f"rank {rank} {_how_it_ended(folder)}")
            return
        member = Member(rank, folder, process)
        self.members[rank] = member
        self._start(self._wait_end(member))

    # ---- hearing --------------------------------------------------------------------------------

    async def _hear(self, lines: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member: Member | None = None
        try:
            while line := await lines.readline():
                word = read(Word, json.loads(line))
                member = self._member(word, writer)
                if member is None:
                    break
                if member.line is not writer:
                    member.line = writer
                    for order in self._orders:
                        _tell(writer, order)
                member.word = word
                self._sum_up()
        except (OSError, ValueError, WireError):
            pass  # It connects again, if it is still one of ours.
        finally:
            if member is not None and member.line is writer:
                member.line = None
            writer.close()

    def _member(self, word: Word, writer: asyncio.StreamWriter) -> Member | None:
        """Whose word it is: the kernel says which process speaks, so that none from a
        generation before is ever heard."""
        raw = writer.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        pid = struct.unpack("3i", raw)[0]
        member = self.members.get(word.rank)
        if word.generation != self.generation or member is None or member.has_ended:
            return None
        return member if member.process.id.pid == pid else None

    def _sum_up(self) -> None:
        words = [member.word for member in self.members.values() if member.word is not None]
        if len(words) < len(self.members) or not words:
            return
        for word in words:
            if word.taking == "failed":
                self._fail(f"rank {word.rank}: {word.failure}", is_bug=word.is_bug)
                return
        peers = sorted({peer for word in words for peer in word.broken_peers})
        is_broken = any(word.taking == "broken" for word in words)
        takings = {word.taking for word in words}
        least: Taking = next((taking for taking in ORDER if taking in takings), "fetching")
        if sealed := _sealed_by_all(words):  # What earlier generations sealed stays until then.
            self.feed(SnapshotsChanged(self.clock.now(), sealed))
        self.feed(
            GangReported(
                self.clock.now(),
                self.generation,
                "broken" if is_broken else least,
                min(word.step for word in words),
                tuple(peers),
            )
        )

    async def _wait_end(self, member: Member) -> None:
        await member.process.wait_ended()
        # What it had started itself is of no use alone, and may hold the device.
        member.process.kill_group()
        await self._wait_written(member)
        member.has_ended = True
        member.process.close()
        self._fail(f"rank {member.rank} {_how_it_ended(member.folder)}", is_bug=_is_bug(member))
        if all(other.has_ended for other in self.members.values()):
            self._exited(self.failure)

    async def _wait_written(self, member: Member) -> None:
        for _ in range(int(EXIT_WRITTEN_S / 0.02)):
            if (member.folder / "exit").exists():
                return
            await asyncio.sleep(0.02)

    def _fail(self, failure: str, *, is_bug: bool = False) -> None:
        if not self.failure:
            self.failure, self.is_bug = failure, is_bug
        self.feed(
            GangReported(
                self.clock.now(), self.generation, "failed", 0, (), self.failure, self.is_bug
            )
        )

    def _exited(self, failure: str) -> None:
        self.members.clear()
        self.feed(GangExited(self.clock.now(), self.generation, failure, self.is_bug))

    # ---- ordering -------------------------------------------------------------------------------

    def tell_stop(self, generation: int, stop_at: int) -> None:
        """Say at which step's end to park."""
        self._order(generation, {"order": "stop", "stop_at": stop_at})

    def abort(self, generation: int) -> None:
        """Say that the generation is over."""
        self._order(generation, {"order": "abort"})

    def kill(self, generation: int) -> None:
        """End all processes of the generation by force."""
        if generation == self.generation:
            for member in self.members.values():
                if not member.has_ended:
                    member.process.kill_group()

    def _order(self, generation: int, order: dict[str, Any]) -> None:
        if generation != self.generation:
            return
        self._orders.append(order)
        for member in self.members.values():
            if member.line is not None:
                _tell(member.line, order)

    # ---- the warm parent ------------------------------------------------------------------------

    async def _warm(self) -> None:
        with contextlib.suppress(OSError):
            await self._ask({"ask": "sync"})
            return
        with (self.folder / "nursery.log").open("ab") as output:
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agents.nursery"),
                *(str(self.folder / "nursery.sock"), self.module),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        end = self.clock.now() + NURSERY_S
        while self.clock.now() < end:
            with contextlib.suppress(OSError):
                await self._ask({"ask": "sync"})
                return
            await asyncio.sleep(0.02)
        raise OSError(f"the warm parent did not come up; see {self.folder / 'nursery.log'}")

    async def _ask(self, question: dict[str, Any]) -> None:
        reader, writer = await asyncio.open_unix_connection(self.folder / "nursery.sock")
        try:
            _tell(writer, question)
            if not await reader.readline():
                raise ConnectionError("the warm parent ended")
        finally:
            writer.close()

    async def close(self, *, is_over: bool) -> None:
        """Listen no more; ``is_over``: this life ends, and the warm parent with it."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        if is_over:
            with contextlib.suppress(OSError):
                await self._ask({"ask": "end"})

    def output(self, rank: int) -> Path:
        """Where a rank writes what it prints."""
        return self._home() / str(rank) / "output"

    def _home(self) -> Path:
        return self.folder / "generation" / str(self.generation)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()  # Our own bug, if it raises: the loop says so.


def _tell(writer: asyncio.StreamWriter, order: dict[str, Any]) -> None:
    writer.write(json.dumps(order).encode() + b"\n")


def _sealed_by_all(words: list[Word]) -> tuple[Sealed, ...]:
    """A point is sealed on the node once every worker has sealed its part of it."""
    by_rank = [{sealed.point: sealed.holds for sealed in word.sealed} for word in words]
    common = set.intersection(*(set(points) for points in by_rank))
    return tuple(
        Sealed(point, tuple(dict.fromkeys(hold for points in by_rank for hold in points[point])))
        for point in sorted(common)
    )


def _how_it_ended(folder: Path) -> str:
    try:
        code = int((folder / "exit").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return "ended, and nobody saw how"
    return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"


def _is_bug(member: Member) -> bool:
    """A worker that ends by itself with an error has one; a killed one need not."""
    try:
        return int((member.folder / "exit").read_text(encoding="ascii")) > 0
    except (OSError, ValueError):
        return False
