"""How much memory a process may still take, and giving back what it no longer needs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from pathlib import Path


def free_host_bytes(
    info: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the bytes that this process may still take; the kernel kills one that takes more.

    What it only caches of files counts as free.
    """
    words = dict(line.split(":", 1) for line in info.read_text(encoding="ascii").splitlines())
    return min(1024 * int(words["MemAvailable"].split()[0]), _left_in_container(group))


def _left_in_container(group: Path) -> int:
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


_M_ARENA_MAX, _ARENAS = -8, 2
"""A parameter of glibc's ``mallopt``, and its value here."""


def keep_few_heaps() -> None:
    """Have threads share two of the C library's heaps, in this process and its forks.

    By default each thread may get one of its own, up to eight for each core, and each keeps the
    largest piece that was freed last: a reconfiguration, whose threads fetch and copy the state,
    would leave that much in one heap more.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


def return_freed_memory() -> None:
    """Give the pages of what is no longer used back to the system, in a few milliseconds.

    glibc keeps freed pages in its heaps wherever something above them is still in use, and pieces
    of up to 32 MiB come from there. Other C libraries have no such call.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
