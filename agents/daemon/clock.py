"""The one clock of a process: seconds since the epoch that never jump."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


def since_boot_s() -> float:
    """Seconds that have passed since this machine started, asleep or awake."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Clock:
    """Set once when the process starts; whoever sets the machine's clock later harms nothing."""

    offset_s: float = field(default_factory=lambda: time.time() - since_boot_s())

    def now(self) -> float:
        """Seconds since the epoch, as they were known when the process started."""
        return self.offset_s + since_boot_s()
