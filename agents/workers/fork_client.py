"""The agent's side of the fork server: starts it once, and asks it to fork workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.daemon.process_cleanup import exists
from agents.daemon.tasks import Tasks
from agents.workers.pidfd import ProcessHandle, ProcessId, open_process, process_start
from worker.plain_file import read_plain
from worker.spec_protocol import NEEDS, PROVES_READS, SPEAKS, why_incompatible

START_S = 120.0
"""Seconds for the fork server to import what workers need."""
SERVICE_S = 30.0
"""Seconds for systemd to restart a service of another user."""
ANSWER_S = 60.0
"""Seconds for an answer; a worker may have stopped its fork server, and systemd starts another."""
LOOK_S = 0.02
EXIT_LOOK_S = 0.05
KILL_AGAIN_S = 0.5
LINE_BYTES_MAX = 1 << 20


class WorkersTooOldError(OSError):
    """The fork server is of a version that this agent cannot direct."""


@dataclass(eq=False)
class ForkClient:
    """The connection to a fork server (``agents.workers.fork_server``) in ``folder``."""

    folder: Path
    module: str
    """The worker's module, which the fork server imports."""
    orphan_s: float
    """Seconds without a call of an agent after which a fork server without children ends."""
    is_service: bool = False
    """Whether it is a service of another user (``sailor-agent workers``): this process can then
    neither start it nor end its processes."""
    _process: asyncio.subprocess.Process | None = None
    """The fork server, if we started it."""
    _speaks: int = SPEAKS
    """The protocol of its workers, as it said last."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tasks: Tasks = field(default_factory=Tasks)

    async def wait_settled(self) -> None:
        """Return when a running fork server has done all that an earlier agent asked for."""
        with contextlib.suppress(OSError):
            await self._ask({"ask": "sync"})

    async def ensure_running(self) -> None:
        """Return when the fork server runs; start it if it does not.

        Raises ``WorkersTooOldError``.
        """
        async with self._lock:
            try:
                await self._ask({"ask": "sync"})
            except OSError:
                await self._start()
        self.check_version()

    def check_version(self) -> None:
        """Raise ``WorkersTooOldError`` if its workers cannot act on our orders."""
        if why := why_incompatible(self._speaks, NEEDS):
            raise WorkersTooOldError(why)

    @property
    def proves_reads(self) -> bool:
        """Whether its workers prove what they read with a grant, as far as it has said."""
        return self._speaks >= PROVES_READS

    async def fork(self, home: Path, spec: dict[str, Any]) -> ProcessId:
        """Fork a worker; its ``process.json`` is written before it runs."""
        await self._ask({"ask": "fork", "folder": str(home), "spec": spec})
        return _read_forked(home)

    def open(self, id_: ProcessId) -> ProcessHandle | None:
        """Open a process that was forked; ``None``: it has ended."""
        return open_process(id_, self._kill_later if self.is_service else None)

    async def run(
        self, home: Path, command: str, cwd: Path, variables: Mapping[str, str], output: int
    ) -> ForkedCommand:
        """Run a shell command, which writes to the descriptor ``output``."""
        about = {"command": command, "cwd": str(cwd), "variables": dict(variables)}
        asked = {"ask": "run", "folder": str(home), **about}
        await asyncio.to_thread(self._ask_with, asked, output)
        return ForkedCommand(self, home, _read_forked(home))

    async def kill_all(self, home: Path) -> None:
        """Kill the processes of a folder, and all their descendants."""
        await self._ask({"ask": "kill_all", "folder": str(home)})

    async def kill(self, id_: ProcessId) -> None:
        """Kill a process of the fork server's user, and all its descendants."""
        await self._ask({"ask": "kill", "pid": id_.pid, "start": id_.start})

    def _kill_later(self, id_: ProcessId) -> None:
        self._tasks.start(self._kill(id_))

    async def _kill(self, id_: ProcessId) -> None:
        while True:
            with contextlib.suppress(OSError):
                await self.kill(id_)
            if process_start(id_.pid) != id_.start:
                return
            await asyncio.sleep(KILL_AGAIN_S)

    async def close(self) -> None:
        """End the fork server, also while it still starts; its children go on."""
        try:
            await self._ask({"ask": "end"})
        except OSError:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()

    async def _start(self) -> None:
        if self.is_service:
            # systemd starts it before the agent, and again if it fails.
            if await self._answers_within(SERVICE_S):
                return
            what = f"no service of the workers' user listens at {self._socket}"
            raise OSError(f"{what}; see systemctl status sailor-worker")
        log = self.folder / "fork_server.log"
        with log.open("ab") as output:
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agents.workers.fork_server"),
                *(str(self._socket), self.module, str(self.orphan_s)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                # A script's sets must have the same order on all ranks.
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
        if not await self._answers_within(START_S, process):
            raise OSError(f"the fork server did not start; see {log}")

    async def _answers_within(
        self, limit_s: float, process: asyncio.subprocess.Process | None = None
    ) -> bool:
        """Wait for its first answer; return whether one came."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while process is None or process.returncode is None:
                    with contextlib.suppress(OSError):
                        await self._ask({"ask": "sync"})
                        return True
                    await asyncio.sleep(LOOK_S)
        return False

    async def _ask(self, question: dict[str, Any]) -> None:
        reader, writer = await asyncio.open_unix_connection(self._socket, limit=LINE_BYTES_MAX)
        try:
            writer.write(json.dumps(question).encode() + b"\n")
            async with asyncio.timeout(ANSWER_S):  # TimeoutError is an OSError.
                answer = _check_answer(await reader.readline())
            if question["ask"] == "sync":
                self._speaks = int(answer.get("speaks", 0))
        finally:
            writer.close()

    def _ask_with(self, question: dict[str, Any], descriptor: int) -> None:
        """Ask in a thread, and pass a descriptor on."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(str(self._socket))
            asked = json.dumps(question).encode() + b"\n"
            sent = socket.send_fds(connection, [asked], [descriptor])
            connection.sendall(asked[sent:])
            with connection.makefile("rb") as answer:
                _check_answer(answer.readline())

    @property
    def _socket(self) -> Path:
        if self.is_service:
            return service_socket(self.folder)
        return self.folder / "fork_server.sock"


def _read_forked(home: Path) -> ProcessId:
    """Read which process was forked; ``ValueError`` if a job has replaced the file."""
    born = json.loads(read_plain(home / "process.json"))
    try:
        return ProcessId(int(born["pid"]), int(born["start"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{home}/process.json names no process ({error})") from None


def _check_answer(line: bytes) -> dict[str, Any]:
    """Return an answer of the fork server; ``OSError`` if it ended, or could not do as asked."""
    if not line:
        raise ConnectionError("the fork server ended")
    answer: dict[str, Any] = json.loads(line)
    if error := answer.get("error"):
        raise OSError(error)
    return answer


@dataclass(eq=False)
class ForkedCommand:
    """A command that the fork server runs; like a process of ``asyncio``."""

    client: ForkClient
    home: Path
    id: ProcessId

    async def wait(self) -> int:
        """Return the exit code once it has ended."""
        while True:
            with contextlib.suppress(FileNotFoundError, ValueError):
                return int(read_plain(self.home / "exit"))
            if not exists(self.id.pid):
                await asyncio.sleep(EXIT_LOOK_S * 4)  # The fork server may still write it.
                with contextlib.suppress(OSError, ValueError):
                    return int(read_plain(self.home / "exit"))
                return -int(signal.SIGKILL)
            await asyncio.sleep(EXIT_LOOK_S)

    async def kill(self) -> None:
        """Kill it and all its descendants; return once it has ended."""
        await self.client.kill(self.id)
        await self.wait()


@dataclass(eq=False)
class ForkedCommands:
    """Runs setup commands as the workers' user."""

    client: ForkClient

    @property
    def home(self) -> Path:
        return self.client.folder / "command"

    async def start(
        self, command: str, cwd: Path, variables: Mapping[str, str], output: int
    ) -> ForkedCommand:
        """Start a shell command, after the end of any earlier one."""
        await self.client.kill_all(self.home)
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        self.home.chmod(0o770)
        return await self.client.run(self.home, command, cwd, variables, output)

    async def end_all(self) -> None:
        """End commands that an agent left running when it was killed."""
        await self.client.kill_all(self.home)


def service_socket(folder: Path) -> Path:
    """Return where ``sailor-agent workers`` listens; its user may write to that folder only."""
    return folder / "fork" / "fork_server.sock"
