"""Finds all processes of a local cluster by a mark in their environment, and kills them.

A launcher puts the cluster's folder into the environment of all that it starts, and processes
inherit it however they fork or change their group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "SAILOR_LOCAL"
GONE_S = 15.0
TRACKER = b"multiprocessing.resource_tracker"
"""Python's process that removes semaphores once their users have ended; it gets time to do so."""
TRACKER_S = 5.0


def mark(folder: Path) -> dict[str, str]:
    """Return the variables that mark a process of this cluster."""
    return {MARK: str(folder)}


def cluster_pids(folder: Path, variable: str = MARK) -> list[int]:
    """Return the pids of all living processes with the mark, except this one."""
    numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in numbers if pid != os.getpid() and _is_marked(pid, folder, variable)]


def _is_marked(pid: int, folder: Path, variable: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{variable}={folder}".encode() in environment.split(b"\0")


def kill_all(folder: Path, variable: str = MARK) -> list[int]:
    """Kill all processes with the mark; return the pids that are left after ``GONE_S``."""
    begin, killed = time.monotonic(), set[int]()
    left, found_none = cluster_pids(folder, variable), False
    # A process that is being forked has no environment yet, so stop after two empty searches.
    while (left or not found_none) and time.monotonic() < begin + GONE_S:
        found_none = not left
        spares = time.monotonic() < begin + TRACKER_S
        for pid in left:
            if not (spares and _is_tracker(pid)):
                kill(pid, folder, variable)
        killed.update(left)
        reap(killed)
        time.sleep(0.02)
        left = cluster_pids(folder, variable)
    reap(killed)
    return left


def _is_tracker(pid: int) -> bool:
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def kill(pid: int, folder: Path, variable: str = MARK) -> None:
    """Kill a process if it has the mark; a pidfd ensures that the pid was not reused."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if _is_marked(pid, folder, variable):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def reap(pids: Iterable[int]) -> None:
    """Reap ended processes, also those that became our children when their parent ended."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def exists(pid: int) -> bool:
    """Return whether there is such a process, of any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def has_ended(pid: int) -> bool:
    """Return whether there is no such process, of any user, or one that was not reaped yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return not exists(pid)  # Processes of other users may be hidden.
    return text.rpartition(")")[2].split()[0] in "ZX"


def children_of(parent: int) -> list[int]:
    """Return the pids of a process's living children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                if int(text.rpartition(")")[2].split()[1]) == parent:
                    found.append(int(entry.name))
    return found
