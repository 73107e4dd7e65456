"""Takes turns with the process's random generators, which all of its threads share."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_in_use = threading.Lock()
_waiting: list[None] = []
"""One entry for each thread that waits for its turn."""
_taken = [0]


def _begin_in_child() -> None:
    """Forget other threads, which a forked process does not have."""
    global _in_use  # noqa: PLW0603 - a lock that a thread of the parent holds is never released
    _in_use = threading.Lock()
    _waiting.clear()


os.register_at_fork(after_in_child=_begin_in_child)


@contextmanager
def turn() -> Iterator[None]:
    """Wait until no other thread uses the generators, and keep them."""
    _waiting.append(None)
    with _in_use:
        _waiting.pop()
        _taken[0] += 1
        yield


@contextmanager
def turn_if_free() -> Iterator[bool]:
    """Keep the generators unless another thread has them or waits for them; yield whether."""
    is_mine = not _waiting and _in_use.acquire(blocking=False)
    try:
        yield is_mine
    finally:
        if is_mine:
            _in_use.release()


def turns_taken() -> int:
    """Return how often a thread has begun to use the generators."""
    return _taken[0]
