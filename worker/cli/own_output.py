"""Keeps what scripts and libraries print apart from a command's own output."""

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
