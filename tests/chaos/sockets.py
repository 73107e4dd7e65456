"""Whose a socket is, as the kernel tells it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

LISTENING = "0A"


def listening() -> dict[int, int]:
    """Ports at which anybody listens, by the numbers of their sockets."""
    return {inode: port for state, inode, port in _table() if state == LISTENING}


def owner_of(port: int, family: Mapping[int, str]) -> str | None:
    """To which of these processes the near end of a connection belongs; by its name."""
    wanted = {inode for state, inode, at in _table() if at == port and state != LISTENING}
    return next((name for pid, name in family.items() if wanted & set(sockets_of(pid))), None)


def sockets_of(pid: int) -> Iterator[int]:
    """The numbers of a process's sockets."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path)):
                    yield int(match[1])


def _table() -> Iterator[tuple[str, int, int]]:
    """State, number and own port of each of this machine's TCP sockets."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                yield fields[3], int(fields[9]), int(fields[1].rpartition(":")[2], 16)
