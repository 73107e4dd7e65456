"""Output that a full disk does not stop: what cannot be written is dropped."""

from __future__ import annotations

import io
import sys
from typing import Any


class _LossyFile(io.FileIO):
    """Drops what its file system refuses: a worker's log is worth less than its training."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def lose_what_cannot_be_written() -> None:
    """Let no ``print`` of this process fail, from now on."""
    sys.stdout, sys.stderr = _make_lossy(sys.stdout), _make_lossy(sys.stderr)


def _make_lossy(before: Any) -> io.TextIOWrapper:
    raw = _LossyFile(before.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=before.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )
