"""Robust statistics of repeated measurements, and when to stop repeating them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

SAMPLES_LEAST = 5
"""The fewest samples, taken even when the time is used up: quartiles of fewer say little."""
SAMPLES_MOST = 200
CONFIDENT = 0.01
"""Measuring ends when the median of a round's total is known to within 1 %."""

SecondsRow = Sequence[float]
"""The seconds of the parts of one round."""


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and half of the interquartile range relative to it."""
    middle = statistics.median(values)
    return middle, _interquartile_range(values) / 2 / middle if middle > 0 else 0.0


def is_confident(values: Sequence[float]) -> bool:
    """Return whether the median is known to within ``CONFIDENT`` of it.

    The 95 % interval of a median is about 1.57 interquartile ranges over the root of the number of
    samples to either side: the notch of a box plot.
    """
    if len(values) < SAMPLES_LEAST:
        return False
    notch = 1.57 * _interquartile_range(values) / math.sqrt(len(values))
    return notch <= CONFIDENT * statistics.median(values)


def _interquartile_range(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def sample(
    take: Callable[[], Sequence[SecondsRow]],
    *,
    now: Callable[[], float],
    until_s: float,
    told: Callable[[int], None] = lambda _: None,
) -> list[SecondsRow]:
    """Take rounds until the median of their totals is known well, or the time is used up.

    ``take`` returns the rounds that were queued together; ``told`` is called with their number.
    """
    rows: list[SecondsRow] = []
    while True:
        rows += take()
        told(len(rows))
        if len(rows) < SAMPLES_LEAST:
            continue
        if len(rows) >= SAMPLES_MOST or now() >= until_s or is_confident([sum(r) for r in rows]):
            return rows
