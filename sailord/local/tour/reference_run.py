"""A reference run of a job without events: one process, one device, in the background."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agents.daemon.process_cleanup import mark
from sailord.local.cluster import ClusterError
from sailord.local.paths import temporary

STEPS_MAX = 100_000
WITHIN_S = 120.0
"""Longest time for a step, or for the start of the process."""


@dataclass(eq=False)
class ReferenceRun:
    """A run at idle priority, without events."""

    name: str
    lines: Path
    process: subprocess.Popen[bytes]

    def losses(self, last: int) -> dict[int, float]:
        """Wait until step ``last`` is done; return the loss of each step."""
        # The timed part is over, and a process with idle priority may get no core at all.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.sched_setscheduler(self.process.pid, os.SCHED_OTHER, os.sched_param(0))
        found: dict[int, float] = {}
        end = time.monotonic() + WITHIN_S
        while time.monotonic() < end:
            with self.lines.open("rb") as file:
                said = [json.loads(line) for line in file if line.endswith(b"\n")]
            if len(said) > len(found):
                end = time.monotonic() + WITHIN_S
            found = {one["step"] + 1: float(one["loss"]) for one in said}
            if last in found:
                return {step: loss for step, loss in found.items() if step <= last}
            if self.process.poll() is not None:
                raise ClusterError(f"the reference run of {self.name} ended: see {self.lines}")
            time.sleep(0.1)
        raise ClusterError(f"the reference run of {self.name} stands still before step {last}")

    def end(self) -> None:
        """Terminate the run."""
        self.process.terminate()
        self.process.wait()


def start_reference_run(folder: Path, name: str, job: str) -> ReferenceRun:
    """Start the reference run of a job."""
    file, lines = folder / f"{name}.toml", folder / f"{name}.losses"
    file.write_text(job, encoding="utf-8")
    with lines.open("wb") as out, (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "worker", "run", "--job", str(file)),
                *("--steps", str(STEPS_MAX), "--json"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            env={**os.environ, **mark(folder), **temporary(folder), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    # Idle priority, so that it does not change the cluster's timings.
    os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
    return ReferenceRun(name, lines, process)


def largest_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """Return the largest relative difference of the losses; infinite if a step is missing."""
    if not theirs or set(ours) != set(theirs):
        return math.inf
    return max(abs(ours[step] - theirs[step]) / abs(theirs[step]) for step in theirs)
