"""What snapshots cost training: how long each one stalls it, and how soon the next may follow.

The two differ. Copying stalls training with each snapshot, however rare. A snapshot that is not yet
sealed, or not yet replicated, stalls training only if the next one comes too soon.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SNAPSHOTS_KEPT = 16
"""Snapshots to average over, since a single one may meet a busy machine."""


def _last() -> deque[float]:
    return deque(maxlen=SNAPSHOTS_KEPT)


@dataclass(eq=False)
class StallStats:
    """Stall times of one rank's snapshots in one generation."""

    needs_replicas: bool
    """Whether training waits for replicas of the last snapshot but one."""
    _stalls: deque[float] = field(default_factory=_last)
    _late: deque[float] = field(default_factory=_last)
    _settled: deque[float] = field(default_factory=_last)
    _copying_s: float | None = None
    """Seconds stalled by the current snapshot, whose copy no update has waited for yet."""
    _late_s: float = 0.0
    """Seconds waited for the previous snapshot."""
    _begun: tuple[int, float] | None = None
    _sealed: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By step: start time, and seconds until it was sealed; not yet replicated."""

    @property
    def stall_s(self) -> float | None:
        """Mean seconds that a snapshot stalled training; ``None``: there was none yet."""
        stalls = list(self._stalls)
        return statistics.fmean(stalls) if stalls else None

    @property
    def late_s(self) -> float | None:
        """Mean seconds of that which were spent waiting for the previous snapshot."""
        late = list(self._late)
        return statistics.fmean(late) if late else None

    @property
    def settle_s(self) -> float | None:
        """Median seconds until the next snapshot would not have to wait; ``None``: unknown yet."""
        settled = list(self._settled)
        return statistics.median(settled) if settled else None

    @contextmanager
    def stalled(self, *, is_late: bool = False) -> Iterator[None]:
        """Measure a stall, for the last snapshot or the next one."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            waited_s = time.perf_counter() - begin_s
            if is_late:
                self._late_s += waited_s
            elif self._copying_s is not None:
                self._copying_s += waited_s
            elif self._stalls:
                self._stalls[-1] += waited_s  # An update has waited for its copy already.

    def begun(self, step: int) -> None:
        """Record that a snapshot starts."""
        self.copied()
        self._copying_s = 0.0
        self._begun = step, time.perf_counter()

    def copied(self) -> None:
        """Record that the update no longer waits for the copy."""
        if self._copying_s is not None:
            self._stalls.append(self._copying_s + self._late_s)
            self._late.append(self._late_s)
            self._copying_s, self._late_s = None, 0.0

    # ---- from other threads ---------------------------------------------------------------------

    def sealed(self, step: int) -> None:
        """Record that a snapshot is sealed here."""
        if self._begun is None or self._begun[0] != step:
            return  # Taken after training ended, so its time means nothing.
        _, begun_s = self._begun
        took_s = time.perf_counter() - begun_s
        if self.needs_replicas:
            self._sealed[step] = begun_s, took_s
        else:
            self._settled.append(took_s)

    def replicated(self, step: int) -> None:
        """Record that a snapshot's replicas are stored or given up; two may be under way."""
        for each in [each for each in list(self._sealed) if each <= step]:
            begun_s, took_s = self._sealed.pop(each)
            if each == step:
                self._settled.append(max(took_s, (time.perf_counter() - begun_s) / 2))
