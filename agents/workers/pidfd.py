"""Processes that are not our children: identified by pid and start time, handled by pidfd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process; with its start time, because the kernel reuses pids."""

    pid: int
    start: int
    """In clock ticks since the boot."""


def process_start(pid: int) -> int | None:
    """Return when a process started; ``None``: there is none, or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name, which may contain blanks and brackets.
    rest = text.rpartition(")")[2].split()
    return None if rest[0] in "ZX" else int(rest[19])


@dataclass(eq=False)
class ProcessHandle:
    """A living process, held by a descriptor that refers to no other one."""

    id: ProcessId
    descriptor: int

    async def wait_ended(self) -> None:
        """Return when the process has ended."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self.descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self.descriptor)

    def kill_group(self) -> None:
        """Kill the process and all that it started; each worker has a process group of its own."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
        # The kernel does not reuse the number of a group that has members.
        if process_start(self.id.pid) in (None, self.id.start):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.id.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.descriptor)


def open_process(id_: ProcessId) -> ProcessHandle | None:
    """Open a process; ``None``: it has ended, even if its pid was reused."""
    try:
        descriptor = os.pidfd_open(id_.pid)
    except OSError:
        return None
    if process_start(id_.pid) != id_.start:
        os.close(descriptor)
        return None
    return ProcessHandle(id_, descriptor)
