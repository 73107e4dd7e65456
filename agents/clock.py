"""The one clock of an agent: seconds since the epoch that never jump."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


def _awake_or_not_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Clock:
    """Set once when the agent starts; whoever sets the machine's clock later harms nothing."""

    offset_s: float = field(default_factory=lambda: time.time() - _awake_or_not_s())

    def now(self) -> float:
        """Seconds since the epoch, as they were known when the agent started."""
        return self.offset_s + _awake_or_not_s()
