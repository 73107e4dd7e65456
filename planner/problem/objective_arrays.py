"""The worth of many plans at once, exactly or with an eye closed for rough estimates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.problem.objective import Limits

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
EASED = 1.15
"""Rough estimates may break a limit by so much before a plan is given up."""


@dataclass(frozen=True, slots=True)
class Worths:
    """What is minimised, from seconds, dollars per second and dollars of egress."""

    limits: Limits

    def exact(self, seconds: Array, usd_per_s: Array, egress_usd: Array) -> Array:
        """The objective, infinite where a limit is broken."""
        possible = np.isfinite(seconds)
        finite = np.where(possible, seconds, 1.0)
        usd = finite * usd_per_s + egress_usd
        for value, most in self._limited(finite, usd):
            possible = possible & (value <= most)
        found: Array = np.where(possible, usd if self.limits.goal_is_cost else seconds, np.inf)
        return found

    def rough(
        self, seconds: Array, usd_per_s: Array, egress_usd: Array, eased: float = EASED
    ) -> Array:
        """The objective, worse where a limit is broken by a little (rough is no proof)."""
        possible = np.isfinite(seconds)
        if not self.limits.needs_prices and self.limits.seconds_max is None:
            return seconds
        finite = np.where(possible, seconds, 1.0)
        usd = finite * usd_per_s + egress_usd
        worth = usd if self.limits.goal_is_cost else finite
        for value, most in self._limited(finite, usd):
            possible = possible & (value <= most * eased)
            worth = worth * np.maximum(1.0, value / max(most, 1e-12)) ** 2
        found: Array = np.where(possible, worth, np.inf)
        return found

    def _limited(self, seconds: Array, usd: Array) -> list[tuple[Array, float]]:
        limits = (
            (usd, self.limits.usd_max),
            (usd / np.maximum(seconds, 1e-12) * 3600, self.limits.objective.max_usd_per_hour),
            (seconds, self.limits.seconds_max),
        )
        return [(value, most) for value, most in limits if most is not None]
