"""Processes that are not our children: known by number and start, watched and killed by pidfd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A number alone is used again after a while; with the start it means one process."""

    pid: int
    start: int
    """In the kernel's ticks since the boot."""


def process_start(pid: int) -> int | None:
    """When a process started; ``None``: there is none, or it has ended and is not yet reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name, which may hold anything, blanks and brackets too.
    rest = text.rpartition(")")[2].split()
    return None if rest[0] in "ZX" else int(rest[19])


@dataclass(eq=False)
class ProcessHandle:
    """One living process, held by a descriptor that can mean no other."""

    id: ProcessId
    descriptor: int

    def has_ended(self) -> bool:
        """Say whether it is over; its memory and devices are given back by then."""
        return bool(select.select([self.descriptor], [], [], 0)[0])

    async def wait_ended(self) -> None:
        """Return when the process is over."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self.descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self.descriptor)

    def kill_group(self) -> None:
        """Kill the process and all that it started; each worker leads a group of its own."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
        # A group's number is not given away again while anybody is left in it.
        if process_start(self.id.pid) in (None, self.id.start):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.id.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.descriptor)


def open_process(id_: ProcessId) -> ProcessHandle | None:
    """Take hold of a process; ``None``: it is over, whoever has its number now."""
    try:
        descriptor = os.pidfd_open(id_.pid)
    except OSError:
        return None
    if process_start(id_.pid) != id_.start:
        os.close(descriptor)
        return None
    return ProcessHandle(id_, descriptor)
