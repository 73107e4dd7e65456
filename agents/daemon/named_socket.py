"""Opens Unix sockets, each under its name only when it can be connected to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def named_socket(path: Path, mode: int) -> Iterator[Path]:
    """Yield where to listen; once the block ends, the socket replaces any file named ``path``."""
    early = path.with_name(f".{path.name}.new")
    early.unlink(missing_ok=True)
    try:
        yield early
        early.chmod(mode)
        early.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            early.unlink(missing_ok=True)
        raise
