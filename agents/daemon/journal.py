"""Log lines to systemd's journal, with their priority and the fields that one searches for."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

SOCKET = Path("/run/systemd/journal/socket")
PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}


def is_journal(descriptor: int) -> bool:
    """Return whether the journal reads the other end of a descriptor, as systemd says."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class Journal:
    """A logger for structlog: each line as one message, in the journal's own protocol."""

    def __init__(self, path: Path = SOCKET) -> None:
        self._path = str(path)

    def msg(self, text: str, *, level: str, fields: Mapping[str, object]) -> None:
        """Send a line; what the journal does not take goes to standard error, with its priority."""
        priority = PRIORITIES.get(level, PRIORITIES["info"])
        parts = {
            "MESSAGE": text,
            "PRIORITY": priority,
            "SYSLOG_IDENTIFIER": Path(sys.argv[0]).name,
            **{f"SAILOR_{key.upper()}": value for key, value in fields.items()},
        }
        message = b"".join(_part(key, str(each)) for key, each in parts.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            out.setblocking(False)
            try:
                out.sendto(message, self._path)
            except OSError:
                print(f"<{priority}>{text}", file=sys.stderr, flush=True)

    debug = info = warning = warn = error = critical = fatal = exception = msg


def _part(key: str, value: str) -> bytes:
    text = value.encode("utf-8", "replace")
    if b"\n" not in text:
        return f"{key}=".encode() + text + b"\n"
    return key.encode() + b"\n" + len(text).to_bytes(8, "little") + text + b"\n"
