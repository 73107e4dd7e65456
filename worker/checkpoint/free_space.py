"""The free bytes of a folder, in memory or on a disk."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def in_mib(size: int) -> str:
    """Format a number of bytes in MiB."""
    return f"{size / 2**20:,.1f} MiB"


def free_bytes(folder: Path) -> int:
    """Return the bytes that may still be written to a folder, which need not exist yet.

    For a folder in memory this is at most the available memory of the machine, or what the limit of
    its container leaves: the kernel kills a process that writes more.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    left = os.statvfs(folder)
    free = left.f_bavail * left.f_frsize
    if not _is_in_memory(folder):
        return free
    available = min(_memory_available(), left_in_container())
    return available if left.f_blocks == 0 else min(free, available)


def _is_in_memory(folder: Path) -> bool:
    device = folder.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount, _, system = line.partition(" - ")
        if mount.split()[2] == name:
            return system.split()[0] in {"tmpfs", "ramfs"}
    return False


def _memory_available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return sys.maxsize


def left_in_container(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that a container's processes may still take; without a limit, very many.

    What the kernel only caches of files counts as free.
    """
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return sys.maxsize  # This is no container, or one of cgroups of version 1.
    if limit == "max":
        return sys.maxsize
    by_kind = dict(line.split() for line in lines)
    cached = sum(int(by_kind.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
    return max(int(limit) - used + cached, 0)
