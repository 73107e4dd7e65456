"""The same job with nothing ever happening to it: one process, one device, in the background."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agents.daemon.process_cleanup import mark_of
from sailord.local.cluster import Failed
from sailord.local.paths import temporary

STEPS_MAX = 100_000
WITHIN_S = 120.0


@dataclass(eq=False)
class Uninterrupted:
    """A run that nobody disturbs, in processor time that nobody else wants."""

    name: str
    lines: Path
    process: subprocess.Popen[bytes]

    def losses(self, last: int) -> dict[int, float]:
        """The loss of each step up to the last one; waits until it is there."""
        end = time.monotonic() + WITHIN_S
        while time.monotonic() < end:
            with self.lines.open("rb") as file:
                said = [json.loads(line) for line in file if line.endswith(b"\n")]
            found = {one["step"] + 1: float(one["loss"]) for one in said}
            if last in found:
                return {step: loss for step, loss in found.items() if step <= last}
            if self.process.poll() is not None:
                raise Failed(f"the uninterrupted run of {self.name} ended: see {self.lines}")
            time.sleep(0.1)
        raise Failed(f"the uninterrupted run of {self.name} did not come to step {last}")

    def end(self) -> None:
        """Run no further."""
        self.process.terminate()
        self.process.wait()


def start_uninterrupted(folder: Path, name: str, job: str) -> Uninterrupted:
    """Start the run."""
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
            env={**os.environ, **mark_of(folder), **temporary(folder), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    # Only what the cluster leaves: its figures are not to be disturbed.
    os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
    return Uninterrupted(name, lines, process)


def largest_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """The largest relative difference of two runs' losses; infinite where a step is missing."""
    if not theirs or set(ours) != set(theirs):
        return math.inf
    return max(abs(ours[step] - theirs[step]) / abs(theirs[step]) for step in theirs)
