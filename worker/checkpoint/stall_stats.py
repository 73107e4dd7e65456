"""What snapshots cost training: how long each holds it up, and how soon there may be another.

The two are not the same. Copying holds training up with each snapshot, however seldom one is
taken; that the last one is not sealed yet, or not copied to another node, does so only where the
next one comes too soon.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SNAPSHOTS_KEPT = 16
"""One may meet a machine that is busy otherwise: the last ones are told of together."""


def _last() -> deque[float]:
    return deque(maxlen=SNAPSHOTS_KEPT)


@dataclass(eq=False)
class StallStats:
    """Of one rank's snapshots of one generation."""

    has_buddies: bool
    """Training waits for copies on other nodes, of the last snapshot but one."""
    _stalls: deque[float] = field(default_factory=_last)
    _late: deque[float] = field(default_factory=_last)
    _settled: deque[float] = field(default_factory=_last)
    _copying_s: float | None = None
    """Held up so far by a snapshot whose copy no update has waited for yet."""
    _late_s: float = 0.0
    """Waited so far since the one before that was late."""
    _begun: tuple[int, float] | None = None
    _sealed: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By step: when it was begun, and how long it took; its copies are not made yet."""

    @property
    def stall_s(self) -> float | None:
        """How long a snapshot held training up, on average; ``None``: there was none yet."""
        stalls = list(self._stalls)
        return statistics.fmean(stalls) if stalls else None

    @property
    def late_s(self) -> float | None:
        """How much of that was since the one before was not out of the way."""
        late = list(self._late)
        return statistics.fmean(late) if late else None

    @property
    def settle_s(self) -> float | None:
        """How long after one the next may be taken without waiting; ``None``: not known yet."""
        settled = list(self._settled)
        return statistics.median(settled) if settled else None

    @contextmanager
    def stalled(self, *, is_late: bool = False) -> Iterator[None]:
        """Training stands still meanwhile, for the snapshot that is taken last or comes next."""
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
                self._stalls[-1] += waited_s  # Its copy has been waited for already.

    def begun(self, step: int) -> None:
        """A snapshot is taken; those before it are over as far as training waits for them."""
        self.copied()
        self._copying_s = 0.0
        self._begun = step, time.perf_counter()

    def copied(self) -> None:
        """The update that had to wait for the copy goes on."""
        if self._copying_s is not None:
            self._stalls.append(self._copying_s + self._late_s)
            self._late.append(self._late_s)
            self._copying_s, self._late_s = None, 0.0

    # ---- from other threads ---------------------------------------------------------------------

    def sealed(self, step: int) -> None:
        """That snapshot is complete here."""
        if self._begun is None or self._begun[0] != step:
            return  # It was taken as training ended: what it cost says nothing.
        _, begun_s = self._begun
        took_s = time.perf_counter() - begun_s
        if self.has_buddies:
            self._sealed[step] = begun_s, took_s
        else:
            self._settled.append(took_s)

    def replicated(self, step: int) -> None:
        """All copies of it are made; two may be on their way at once."""
        for each in [each for each in list(self._sealed) if each <= step]:
            begun_s, took_s = self._sealed.pop(each)
            if each == step:
                self._settled.append(max(took_s, (time.perf_counter() - begun_s) / 2))
