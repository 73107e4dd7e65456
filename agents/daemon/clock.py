"""The clock of a process, which never jumps, and the identity of this boot."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path


def since_boot_s() -> float:
    """Return the seconds since this machine booted, time in suspension included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the kernel's identifier of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds since the epoch; changes of the system clock after the start have no effect."""

    offset_s: float = field(default_factory=lambda: time.time() - since_boot_s())

    def now(self) -> float:
        """Return the seconds since the epoch."""
        return self.offset_s + since_boot_s()
