"""Processes that are not our children: identified by pid and start time, handled by pidfd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections.abc import Callable
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


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and user at the other end of a Unix socket, as the kernel reports them."""
    size = struct.calcsize("3i")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, user, _ = struct.unpack("3i", raw)
    return pid, user


def kill_group(pid: int, start: int | None) -> None:
    """Kill the process group of a process that began at ``start``, also after its end."""
    # The kernel does not reuse the id of a process group that has members.
    if process_start(pid) in (None, start):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


@dataclass(eq=False)
class ProcessHandle:
    """A living process, held by a descriptor that refers to no other one."""

    id: ProcessId
    descriptor: int
    kill_later: Callable[[ProcessId], None] | None = None
    """Asks for the kill of a process of another user; ``None``: the process is ours."""

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
        if self.kill_later is not None:
            self.kill_later(self.id)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
        kill_group(self.id.pid, self.id.start)

    def close(self) -> None:
        os.close(self.descriptor)


def open_process(
    id_: ProcessId, kill_later: Callable[[ProcessId], None] | None = None
) -> ProcessHandle | None:
    """Open a process; ``None``: it has ended, even if its pid was reused."""
    try:
        descriptor = os.pidfd_open(id_.pid)
    except OSError:
        return None
    if process_start(id_.pid) != id_.start:
        os.close(descriptor)
        return None
    return ProcessHandle(id_, descriptor, kill_later)
