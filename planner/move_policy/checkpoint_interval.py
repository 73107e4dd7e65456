"""The interval of durable checkpoints, by Young and Daly."""

from __future__ import annotations

import math

PRIOR_S = 6 * 3600.0
"""Assumed time between two losses before anything was observed."""


def checkpoint_every_s(
    *, cost_s: float, write_s: float, observed_s: float, losses: int | float
) -> float:
    """Seconds between two checkpoints: √(2 · cost · time between losses).

    ``cost_s`` is what one takes from training, ``losses`` are those that were observed in
    ``observed_s``. A checkpoint begins after the last one was written, which takes ``write_s``.
    """
    between_s = (observed_s + PRIOR_S) / (losses + 1)
    return max(write_s, math.sqrt(2 * cost_s * between_s))
