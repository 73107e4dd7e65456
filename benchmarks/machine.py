"""What programs that run clusters share: waiting, stolen time, priority, the exit status of a miss.

Stolen time is processor time that a virtual machine's host gave to others.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sailord.client import ServerProblem
from sailord.local.cluster import LocalCluster

TARGET_MISSED = 3
"""Exit status of a program that measured, and missed a target. 1 is Python's for an error, 2
argparse's for what it cannot run with; `make bench` says which it was."""


def _times() -> list[int]:
    """Return user, nice, system, idle, iowait, irq, softirq, steal of all cores since the boot."""
    first, _, _ = Path("/proc/stat").read_text(encoding="ascii").partition("\n")
    return [int(word) for word in first.split()[1:9]]


def stolen_share(before: list[int], after: list[int]) -> float:
    """Return the stolen share of the processor time that this machine wanted."""
    user, nice, system, _, _, irq, softirq, steal = (
        b - a for a, b in zip(before, after, strict=True)
    )
    wanted = user + nice + system + irq + softirq + steal
    return steal / wanted if wanted > 0 else 0.0


def wait_for(cluster: LocalCluster, holds: Callable[[], Any], *, within_s: float = 40.0) -> Any:
    """Return the first true answer, and look after the cluster meanwhile."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        cluster.look_after()
        with contextlib.suppress(ServerProblem):
            if value := holds():
                return value
        time.sleep(0.1)
    raise TimeoutError


def put_ahead(pid: int = 0, *, priority: int = 1) -> None:
    """Give a process and its children real-time priority over everything else that runs here.

    ``nice`` is not enough: Linux shares the cores between sessions first (autogroup), and a process
    that wakes up waits for the time slice of the one that runs, some milliseconds.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(priority))


@contextlib.contextmanager
def report_stolen_time() -> Iterator[None]:
    """Print at the end of the block how much processor time was stolen."""
    before = _times()
    try:
        yield
    finally:
        share = stolen_share(before, _times())
        print(f"\n{os.cpu_count()} cores; the host stole {share:.0%} of their time")
