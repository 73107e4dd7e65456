"""A virtual clock: what is due happens in the order of its moment, then of its request."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """Time passes only from one thing that is due to the next."""

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
