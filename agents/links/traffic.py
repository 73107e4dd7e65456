"""The traffic of this node's network devices, by the kernel's counters."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

COUNTERS = Path("/proc/thread-self/net/dev")


def bytes_carried(text: str) -> int:
    """Return the bytes that all devices received and sent, from the text of ``/proc/net/dev``."""
    total = 0
    for line in text.splitlines()[2:]:
        fields = line.partition(":")[2].split()
        total += int(fields[0]) + int(fields[8])
    return total


async def bytes_per_s(look_s: float) -> float:
    """Return the traffic of this node, measured over ``look_s`` seconds."""
    before, begun = bytes_carried(COUNTERS.read_text(encoding="ascii")), time.monotonic()
    await asyncio.sleep(look_s)
    after = bytes_carried(COUNTERS.read_text(encoding="ascii"))
    return (after - before) / (time.monotonic() - begun)


async def busy(quiet_bytes_per_s: float, look_s: float) -> str:
    """Return why nothing should be measured now; an empty text if the node is quiet."""
    found = await bytes_per_s(look_s)
    if found <= quiet_bytes_per_s:
        return ""
    return f"carries {found / 1e6:.1f} MB/s, more than {quiet_bytes_per_s / 1e6:.1f}"
