"""Keeps a command's own output apart from what scripts and libraries print, or discards it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Send what is written to stdout to stderr, whichever object a library has kept of it."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def discard_output() -> None:
    """Redirect stdout to /dev/null, so that Python's flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
