"""A virtual clock, and processes that live on it: killed, frozen, and each with its own time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

EPOCH_S = 10_000.0
"""What a right clock shows at the beginning: set back by hours it is not before 1970."""


class Clock:
    """What is due happens in the order of its moment, then of its request."""

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
    """Something that runs on a machine until it is killed, and stands still while it is frozen.

    Its time is the machine's as it was set when the process began, and goes on evenly from there,
    as a clock does that counts from the boot: who sets the machine's clock later harms nothing.
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
        """Do it now; or when it is thawed, all that waited in its order; or never."""
        if not self.is_up:
            return
        if self.clock.now < self.frozen_until:
            self.after(self.frozen_until - self.clock.now, what)
        else:
            what()

    def freeze(self, seconds: float) -> None:
        self.frozen_until = max(self.frozen_until, self.clock.now + seconds)
