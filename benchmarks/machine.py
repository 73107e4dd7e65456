"""The share of processor time that a virtual machine's host gave to others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def _times() -> list[int]:
    """Of all processors since they began: user, nice, system, idle, iowait, irq, softirq, steal."""
    first, _, _ = Path("/proc/stat").read_text(encoding="ascii").partition("\n")
    return [int(word) for word in first.split()[1:9]]


def stolen_share(before: list[int], after: list[int]) -> float:
    """Of the processor time that this machine wanted, as much as its host gave to others."""
    user, nice, system, _, _, irq, softirq, steal = (
        b - a for a, b in zip(before, after, strict=True)
    )
    wanted = user + nice + system + irq + softirq + steal
    return steal / wanted if wanted > 0 else 0.0


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Say at the end how much of the machine its host had given away meanwhile."""
    before = _times()
    try:
        yield
    finally:
        share = stolen_share(before, _times())
        print(f"\n{os.cpu_count()} cores; others had {share:.0%} of the time that was wanted")
