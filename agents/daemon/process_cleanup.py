"""Leaves nothing behind: finds every process of a local cluster by its mark, and ends it.

All that a launcher starts carries the cluster's folder in its environment, and so does whatever
they start in turn, however often it forked or changed its group.
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
"""Python's own process that removes semaphores once those that used them are gone."""
TRACKER_S = 5.0


def mark_of(folder: Path) -> dict[str, str]:
    """Return what a process of this cluster has in its environment."""
    return {MARK: str(folder)}


def marked(folder: Path) -> list[int]:
    """Every living process of the cluster in this folder, but the one that asks."""
    numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in numbers if pid != os.getpid() and _is_marked(pid, folder)]


def _is_marked(pid: int, folder: Path) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{MARK}={folder}".encode() in environment.split(b"\0")


def end_all(folder: Path) -> list[int]:
    """Kill all processes of the cluster; return those that would not go."""
    begin, killed = time.monotonic(), set[int]()
    left = marked(folder)
    while left and time.monotonic() < begin + GONE_S:
        spares = time.monotonic() < begin + TRACKER_S
        for pid in left:
            if not (spares and _is_tracker(pid)):
                kill(pid, folder)
        killed.update(left)
        bury(killed)
        time.sleep(0.02)
        left = marked(folder)
    bury(killed)
    return left


def _is_tracker(pid: int) -> bool:
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def kill(pid: int, folder: Path) -> None:
    """Kill a process if it is one of the cluster; by a descriptor, which can mean no other."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if _is_marked(pid, folder):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def bury(pids: Iterable[int]) -> None:
    """Take leave of ended processes, those that came to us when their own parent ended too."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def children_of(parent: int) -> list[int]:
    """The processes that a process has forked and that live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                if int(text.rpartition(")")[2].split()[1]) == parent:
                    found.append(int(entry.name))
    return found
