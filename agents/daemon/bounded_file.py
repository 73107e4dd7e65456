"""Limits the disk space of log files that other processes append to, without rotation."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from worker.plain_file import open_plain

DISK_BYTES_MAX = 64 * 2**20
"""Disk space of one file above which all but its last ``KEPT_BYTES`` is freed."""
KEPT_BYTES = 32 * 2**20
BOUND_S = 5.0
"""How often files are looked at."""
BLOCK_BYTES = 4096
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


async def keep_bounded(files: Callable[[], Iterable[Path]]) -> None:
    """Limit files that other processes append to, and this process's own log, forever."""
    while True:
        for path in [*files(), *own_log()]:
            # It was deleted, or its file system cannot free blocks.
            with contextlib.suppress(OSError):
                bound(path)
        await asyncio.sleep(BOUND_S)


def own_log() -> Iterator[Path]:
    """Yield the file that standard error is written to, if it is a regular file."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = sys.stderr.fileno()
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            yield Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def bound(path: Path) -> None:
    """Free the disk blocks at the beginning of a long file; its size and offsets stay."""
    with open_plain(path, "r+b") as file:
        about = os.fstat(file.fileno())
        if about.st_blocks * 512 <= DISK_BYTES_MAX:
            return
        end = (about.st_size - KEPT_BYTES) // BLOCK_BYTES * BLOCK_BYTES
        libc = ctypes.CDLL(None, use_errno=True)
        mode, first, size = _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(end)
        if libc.fallocate(file.fileno(), mode, first, size) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
