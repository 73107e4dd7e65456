"""The mix of Spot and on-demand machines that the configuration asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mix:
    """How many machines must be on demand, and when more may be; the default sets no limit."""

    on_demand_min: int = 0
    """At least this many machines are on demand, where available."""
    on_demand_share_min: float = 0.0
    """At least this share of all machines is on demand, where that is more."""
    on_demand_after_s: float | None = None
    """Rent more on demand only after Spot machines with that GPU were out of stock this long."""

    @property
    def prefers_spot(self) -> bool:
        """Whether Spot is preferred beyond the on-demand minimum."""
        return self != Mix()

    def least(self, machines: int) -> int:
        """Return how many of this many machines must be on demand."""
        share = math.ceil(self.on_demand_share_min * machines - 1e-9)
        return min(max(self.on_demand_min, share), machines)
