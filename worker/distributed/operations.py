"""Numbers the operations of one rank, to find out which rank is to blame for a hang.

Members of a group start its operations in one order, so an operation has the same number on all of
them. A rank that has not started the number that others wait for is to blame (``stalls``).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from worker.distributed.stalls import RankPosition


@dataclass(slots=True, eq=False)
class StartedOperation:
    """One collective or transfer."""

    group: str
    number: int
    """Counted from 1 in its group."""
    what: str
    begun_s: float
    turn: int = 0
    """Counted over all groups of this rank."""
    is_transfer: bool = False
    work: Any = None
    """The library's handle, once the operation is started."""


class OperationLog:
    """One rank's operations; used by its main thread, and read by others."""

    def __init__(
        self, *, keeps_unfinished: bool, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts: Counter[str] = Counter()
        """How many operations were started in each group."""
        self.members: dict[str, tuple[int, ...]] = {}
        """The ranks of each group."""
        self._now = now
        self._keeps_unfinished = keeps_unfinished
        self._turns = 0
        self._unfinished: dict[str, deque[StartedOperation]] = {}
        """By group: only operations of one group end in the order in which they were started."""
        self._lock = threading.Lock()
        """Held by the thread that adds an operation or drops those which are over."""
        self._waiting: StartedOperation | None = None

    def begin(self, group: str, what: str, *, is_transfer: bool = False) -> StartedOperation:
        """Number an operation that is about to be started."""
        number = self.counts[group] + 1
        self.counts[group] = number
        self._turns += 1
        operation = StartedOperation(group, number, what, self._now(), self._turns, is_transfer)
        if self._keeps_unfinished:
            with self._lock:
                # The handle of a finished operation would keep its tensors in memory.
                self._drop_finished()
                self._unfinished.setdefault(group, deque()).append(operation)
        return operation

    @contextmanager
    def on_host(self, group: str, what: str) -> Iterator[None]:
        """Number an operation that blocks the host with any library, such as opening a group."""
        number = self.counts[group] + 1
        self.counts[group] = number
        self._waiting = StartedOperation(group, number, what, self._now())
        try:
            yield
        finally:
            self._waiting = None

    def begin_wait(self, operation: StartedOperation) -> None:
        """Record that the host waits for an operation, unless waits do not block it."""
        if self._keeps_unfinished:
            return
        operation.begun_s = self._now()
        self._waiting = operation

    def end_wait(self) -> None:
        """Record that the host no longer waits."""
        self._waiting = None

    def position(self, activity: str) -> RankPosition:
        """Return this rank's position, for peers that wait for it."""
        oldest = self.oldest()
        if oldest is None:
            return RankPosition(dict(self.counts), None, activity)
        operation = oldest[0]
        what = f"{operation.what}, number {operation.number}"
        return RankPosition(dict(self.counts), (operation.group, operation.number), what)

    def oldest(self) -> tuple[StartedOperation, float] | None:
        """Return what this rank waits for, and for how many seconds.

        That is what the host waits for or, where waits do not block it, the first operation that
        the device has not finished.
        """
        waiting = self._waiting
        if waiting is None:
            with self._lock:
                self._drop_finished()
                waiting = self._find_first()
        return None if waiting is None else (waiting, self._now() - waiting.begun_s)

    def _drop_finished(self) -> None:
        """Drop the first operations of each group that are over; called with the lock."""
        before = self._find_first()
        for operations in self._unfinished.values():
            while operations and _is_over(operations[0]):
                operations.popleft()
        first = self._find_first()
        if first is not None and first is not before:
            # The device reaches operations in order, so this one began to wait when the one before
            # ended.
            first.begun_s = max(first.begun_s, self._now())

    def _find_first(self) -> StartedOperation | None:
        """Return the operation that was started first of those kept; called with the lock."""
        firsts = (operations[0] for operations in self._unfinished.values() if operations)
        return min(firsts, key=lambda each: each.turn, default=None)


class MembersByName(dict[str, tuple[int, ...]]):
    """The ranks of each group; those of groups without this rank are read from the name."""

    def __missing__(self, name: str) -> tuple[int, ...]:
        return tuple(int(part) for part in name.replace(" to ", "-").split("-"))


def _is_over(operation: StartedOperation) -> bool:
    return operation.work is not None and bool(operation.work.is_completed())
