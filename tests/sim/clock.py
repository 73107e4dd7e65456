"""A virtual clock, and processes on it that can be killed, frozen and have their own time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

EPOCH_S = 10_000.0
"""The initial wall-clock time: large enough to be set back by hours."""


class Clock:
    """Runs callbacks in the order of their times, then of their registration."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self._asked += 1
        heapq.heappush(self._due, (self.now + max(seconds, 0.0), self._asked, what))

    def run_until(self, end: float) -> None:
        while self._due and self._due[0][0] <= end:
            self.now, _, what = heapq.heappop(self._due)
            what()
        self.now = end


class Process:
    """A process that runs on a machine until killed, and does nothing while frozen.

    Its time starts at the machine's clock when the process starts and is monotonic from there:
    setting the machine's clock later has no effect on it.
    """

    def __init__(self, clock: Clock, *, ahead_s: float) -> None:
        self.clock, self.ahead_s = clock, ahead_s
        self.is_up = True
        self.frozen_until = 0.0

    @property
    def now(self) -> float:
        return EPOCH_S + self.clock.now + self.ahead_s

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.clock.after(seconds, lambda: self.run(what))

    def run(self, what: Callable[[], None]) -> None:
        """Run the callback now; after a thaw, in order, if frozen; never if killed."""
        if not self.is_up:
            return
        if self.clock.now < self.frozen_until:
            self.after(self.frozen_until - self.clock.now, what)
        else:
            what()

    def freeze(self, seconds: float) -> None:
        self.frozen_until = max(self.frozen_until, self.clock.now + seconds)
