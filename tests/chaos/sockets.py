"""Finds a socket's owner in the kernel's tables."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

LISTENING = "0A"


def listening() -> dict[int, int]:
    """Return all listening ports by the inode of their socket."""
    return {inode: port for state, inode, port in _table() if state == LISTENING}


def owner_of(port: int, family: Mapping[int, str]) -> str | None:
    """Return the name of the process that owns a connection's near end."""
    wanted = {inode for state, inode, at in _table() if at == port and state != LISTENING}
    return next((name for pid, name in family.items() if wanted & set(sockets_of(pid))), None)


def sockets_of(pid: int) -> Iterator[int]:
    """Return the inodes of a process's sockets."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path)):
                    yield int(match[1])


def _table() -> Iterator[tuple[str, int, int]]:
    """Yield state, inode and local port of each TCP socket of this machine."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                yield fields[3], int(fields[9]), int(fields[1].rpartition(":")[2], 16)
