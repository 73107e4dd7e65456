"""The environment of a job on a node: a virtual environment over the agent's own, and its setup.

``pip`` in a setup command installs into the environment; what the agent's Python has is there
already. Secrets are variables of the commands, and are blotted out in their log.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import site
import subprocess
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import agents
from agents.work.work_folder import WorkFolder, packages_of

COMMAND_S = 3600.0
"""The longest time for one setup command."""
LINES_SHOWN = 3
TEXT_MAX = 500
BLOT = b"***"
NO_PIP = "setup needs pip on the node: install it into the agent's Python, or python3-venv"


class SetupError(Exception):
    """A setup command failed; the message names it, its exit code and its last lines."""


async def set_up(folder: WorkFolder, commands: tuple[str, ...], secrets: Mapping[str, str]) -> None:
    """Make the environment and run the commands in it, in the work folder."""
    try:
        await asyncio.to_thread(_make, folder.environment)
    except subprocess.CalledProcessError:
        raise SetupError(NO_PIP) from None
    variables = {
        **os.environ,
        **secrets,
        "VIRTUAL_ENV": str(folder.environment),
        "PATH": f"{folder.environment / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
    }
    hidden = sorted((value.encode() for value in secrets.values() if value), key=len, reverse=True)
    with folder.log.open("ab") as log:
        for command in commands:
            await _run(command, folder.files, variables, _Log(log, hidden))


def _make(environment: Path) -> None:
    has_pip = importlib.util.find_spec("pip") is not None
    venv.EnvBuilder(symlinks=True, with_pip=not has_pip).create(environment)
    # A virtual environment over another one would see the system's packages, not the other's.
    below = [*site.getsitepackages(), str(Path(agents.__file__).resolve().parents[1])]
    lines = "".join(f"import site; site.addsitedir({each!r})\n" for each in below)
    (packages_of(environment) / "_sailor.pth").write_text(lines, encoding="utf-8")
    if has_pip:
        script = environment / "bin" / "pip"
        script.write_text('#!/bin/sh\nexec "$(dirname "$0")/python" -m pip "$@"\n')
        script.chmod(0o755)


class _Log:
    """Writes lines without secrets, and keeps the last ones."""

    def __init__(self, file: IO[bytes], hidden: list[bytes]) -> None:
        self.file, self.hidden = file, hidden
        self.last: list[str] = []

    def write(self, line: bytes) -> None:
        for value in self.hidden:
            line = line.replace(value, BLOT)
        self.file.write(line)
        self.file.flush()
        if text := line.decode(errors="replace").strip():
            self.last = [*self.last, text][-LINES_SHOWN:]


async def _run(command: str, cwd: Path, variables: dict[str, str], log: _Log) -> None:
    log.write(f"$ {command}\n".encode())
    log.last.clear()
    process = await asyncio.create_subprocess_shell(
        command,
        cwd=cwd,
        env=variables,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(COMMAND_S):
            # Lines may be long, as progress bars are; a part of one hides no secret cut in two.
            while line := await _line(process.stdout):
                log.write(line)
            code = await process.wait()
    except TimeoutError:
        raise SetupError(f"setup `{command}` did not end within {COMMAND_S:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if code != 0:
        log.file.write(f"exited with {code}\n".encode())
        how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
        last = " | ".join(log.last) or "it printed nothing"
        raise SetupError(f"setup `{command}` {how}: {last[-TEXT_MAX:]}")


async def _line(stream: asyncio.StreamReader) -> bytes:
    """Read one line, or what there is of one that is longer than the reader's limit."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)
