"""The free bytes of a folder, in memory or on a disk."""

from __future__ import annotations

import os
from pathlib import Path

from worker.host_memory import free_host_bytes


def in_mib(size: int) -> str:
    """Format a number of bytes in MiB."""
    return f"{size / 2**20:,.1f} MiB"


def free_bytes(folder: Path) -> int:
    """Return the bytes that may still be written to a folder, which need not exist yet.

    For a folder in memory this is at most what the machine, or the container, has left.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    left = os.statvfs(folder)
    free = left.f_bavail * left.f_frsize
    if not _is_in_memory(folder):
        return free
    available = free_host_bytes()
    return available if left.f_blocks == 0 else min(free, available)


def _is_in_memory(folder: Path) -> bool:
    device = folder.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount, _, system = line.partition(" - ")
        if mount.split()[2] == name:
            return system.split()[0] in {"tmpfs", "ramfs"}
    return False
