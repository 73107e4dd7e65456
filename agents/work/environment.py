"""The environment of a job on a node: a virtual environment over the agent's own, and its setup.

``pip`` in a setup command installs into the environment; what the agent's Python has is there
already. Secrets are variables of the commands, and are blotted out in their log.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import shlex
import signal
import site
import subprocess
import sys
import venv
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ParamSpec, Protocol, TypeVar

import agents
from agents.work.work_folder import SETUP, WorkFolder, packages_of

P = ParamSpec("P")
T = TypeVar("T")

COMMAND_S = 3600.0
"""The longest time for one setup command."""
DRAIN_S = 1.0
"""Seconds after a command's end in which what it left running may print before it is killed."""
READ_BYTES = 1 << 16
LINES_SHOWN = 3
TEXT_MAX = 500
TAIL_BYTES = 4 * TEXT_MAX
LINE_BYTES_MIN = 6
"""Lines of a secret that are shorter are hidden only with all of it."""
BLOT = b"***"
NO_PIP = "setup needs pip on the node: install it into the agent's Python, or python3-venv"


class SetupError(Exception):
    """A setup command failed; the message names it, its exit code and its last lines."""


class RunningCommand(Protocol):
    """A running command."""

    async def wait(self) -> int:
        """Return its exit code once it has ended."""

    async def kill(self) -> None:
        """Kill it and what it has started; return once it has ended."""


class Commands(Protocol):
    """Runs commands as the workers' user, if that is not the agent's."""

    async def start(
        self, command: str, cwd: Path, variables: Mapping[str, str], output: int
    ) -> RunningCommand:
        """Start a shell command, which writes to the descriptor ``output``."""

    async def end_all(self) -> None:
        """End commands that an agent left running when it was killed."""


async def set_up(
    folder: WorkFolder,
    commands: tuple[str, ...],
    secrets: Mapping[str, str],
    runner: Commands | None = None,
) -> None:
    """Make the environment and run the commands in it, in the work folder."""
    try:
        if runner is None:
            await in_thread(make_environment, folder.environment)
        else:
            await _make_as_another_user(folder, runner)
    except subprocess.CalledProcessError:
        raise SetupError(NO_PIP) from None
    variables = {
        **secrets,
        SETUP: str(folder.home),
        "VIRTUAL_ENV": str(folder.environment),
        "PATH": f"{folder.environment / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
    }
    if folder.constraints.exists():
        variables["PIP_CONSTRAINT"] = str(folder.constraints)
    hidden = hidden_of(secrets.values())
    with folder.log.open("ab") as log:
        for command in commands:
            await _run(command, folder.files, variables, _Log(log, hidden), runner)


async def in_thread(act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Act in a thread; a cancelled task waits for the thread, which cannot be cancelled."""
    acting = asyncio.ensure_future(asyncio.to_thread(act, *args, **kwargs))
    try:
        return await asyncio.shield(acting)
    finally:
        await asyncio.wait([acting])


def hidden_of(secrets: Iterable[str]) -> list[bytes]:
    """Return what no log may show: the secrets and their lines, the longest first."""
    found = {value.encode() for value in secrets if value}
    lines = {line.strip() for value in found for line in value.splitlines()}
    found |= {line for line in lines if len(line) >= LINE_BYTES_MIN}
    return sorted(found, key=len, reverse=True)


async def _make_as_another_user(folder: WorkFolder, runner: Commands) -> None:
    command = shlex.join([sys.executable, "-m", __name__, str(folder.environment)])
    variables = {"PYTHONPATH": str(Path(agents.__file__).resolve().parents[1])}
    with open(os.devnull, "wb") as nothing:
        log = _Log(nothing, [])
        try:
            await _run(command, folder.home, variables, log, runner)
        except SetupError as error:
            raise SetupError(f"{NO_PIP} ({' | '.join(log.last) or error})") from None


def make_environment(environment: Path) -> None:
    """Make a virtual environment with pip that sees this Python's packages."""
    has_pip = importlib.util.find_spec("pip") is not None
    venv.EnvBuilder(symlinks=True, with_pip=not has_pip).create(environment)
    # A virtual environment over another one would see the system's packages, not the other's.
    below = [*site.getsitepackages(), str(Path(agents.__file__).resolve().parents[1])]
    # In its own Python only: a worker has such packages, and after an upgrade newer ones.
    begin = f"import site, sys; sys.prefix == {str(environment)!r} and site.addsitedir"
    lines = "".join(f"{begin}({each!r})\n" for each in below)
    (packages_of(environment) / "_sailor.pth").write_text(lines, encoding="utf-8")
    if has_pip:
        script = environment / "bin" / "pip"
        script.write_text('#!/bin/sh\nexec "$(dirname "$0")/python" -m pip "$@"\n')
        script.chmod(0o755)


class _Log:
    """Writes what a command prints without secrets, and keeps the last lines."""

    def __init__(self, file: IO[bytes], hidden: list[bytes]) -> None:
        self.file, self.hidden = file, hidden
        self.pattern = re.compile(b"|".join(map(re.escape, hidden)) or b"(?!)")
        self.held = self.tail = b""

    def write(self, part: bytes, *, is_last: bool = False) -> None:
        """Write a part; hold back its end if a secret may begin there."""
        text = self.held + part
        end = len(text) if is_last else len(text) - self._count_begun(text)
        for found in self.pattern.finditer(text):
            if found.start() < end < found.end():
                end = found.end()
        shown, self.held = self.pattern.sub(BLOT, text[:end]), text[end:]
        self.file.write(shown)
        self.file.flush()
        self.tail = (self.tail + shown)[-TAIL_BYTES:]

    def _count_begun(self, text: bytes) -> int:
        """Return how many of the last bytes are the beginning of a secret."""
        found = 0
        for value in self.hidden:
            for count in range(min(len(value) - 1, len(text)), found, -1):
                if text.endswith(value[:count]):
                    found = count
                    break
        return found

    @property
    def last(self) -> list[str]:
        lines = self.tail.decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()][-LINES_SHOWN:]


async def _run(
    command: str, cwd: Path, variables: dict[str, str], log: _Log, runner: Commands | None
) -> None:
    log.write(f"$ {command}\n".encode(), is_last=True)
    log.tail = b""
    # With a pipe of asyncio's own, wait() would wait for all that hold its other end.
    reads, writes = os.pipe()
    with open(reads, "rb", buffering=0) as output:
        try:
            starting: Awaitable[RunningCommand]
            if runner is None:
                starting = _start(command, cwd, {**os.environ, **variables}, writes)
            else:
                starting = runner.start(command, cwd, variables, writes)
            process = await _start_or_end(starting)
        finally:
            os.close(writes)
        reading = asyncio.create_task(_read(output, log))
        try:
            async with asyncio.timeout(COMMAND_S):
                code = await process.wait()
            await asyncio.wait([reading], timeout=DRAIN_S)
            if reading.done():
                reading.result()  # A log that cannot be written is a failure.
        except TimeoutError:
            raise SetupError(f"setup `{command}` did not end within {COMMAND_S:.0f} s") from None
        finally:
            await process.kill()
            reading.cancel()
            await asyncio.wait([reading])
            log.write(b"", is_last=True)
    if code != 0:
        log.file.write(f"exited with {code}\n".encode())
        how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
        last = " | ".join(log.last) or "it printed nothing"
        raise SetupError(f"setup `{command}` {how}: {last[-TEXT_MAX:]}")


async def _start_or_end(command: Awaitable[RunningCommand]) -> RunningCommand:
    """Return a command once it is started; if cancelled meanwhile, end it and what it started."""
    starting = asyncio.ensure_future(command)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # Asyncio itself would end the shell alone, or nothing at all where a thread starts it.
        await asyncio.wait([starting])
        if starting.exception() is None:
            with contextlib.suppress(OSError):  # The task must end as cancelled.
                await starting.result().kill()
        raise


async def _start(command: str, cwd: Path, variables: dict[str, str], writes: int) -> OwnCommand:
    """Start a command in a process group of its own."""
    return OwnCommand(
        await asyncio.create_subprocess_shell(
            command,
            cwd=cwd,
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=writes,
            stderr=writes,
            start_new_session=True,
        )
    )


@dataclass(eq=False)
class OwnCommand:
    """A command of the agent's user."""

    process: asyncio.subprocess.Process

    async def wait(self) -> int:
        """Return its exit code once it has ended."""
        return await self.process.wait()

    async def kill(self) -> None:
        """Kill its process group; return once it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


async def _read(output: IO[bytes], log: _Log) -> None:
    """Write to the log what comes from a pipe, until all its writers have ended."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), output
    )
    try:
        while part := await stream.read(READ_BYTES):
            log.write(part)
    finally:
        transport.close()


if __name__ == "__main__":
    make_environment(Path(sys.argv[1]))
