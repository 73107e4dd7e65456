"""Reads the steps of a job from the logs of its workers: when each was done, and its loss.

A worker prints a line of JSON at the end of each step. The logs stay after the node is killed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

MEDIAN_OF = 10
"""How many of the last intervals between steps the median takes."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A step, as reported by the first rank that finished it."""

    generation: int
    step: int
    at: float
    loss: float
    sample_hash: str


@dataclass(eq=False)
class StepLog:
    """All steps of one job, by generation."""

    folder: Path
    job: str
    steps: dict[tuple[int, int], LoggedStep] = field(default_factory=dict)
    _read: dict[Path, int] = field(default_factory=dict)

    def read_new_lines(self) -> None:
        """Read what the workers wrote since the last call."""
        for path in self.folder.glob("*/process/*/output"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, end, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(end)
            for line in whole.splitlines():
                self._note(line)

    def _note(self, line: bytes) -> None:
        if not line.startswith(b'{"job": '):
            return
        said: Mapping[str, Any] = json.loads(line)
        if said["job"] != self.job or "evaluation" in said:
            return
        key = said["generation"], said["step"]
        known = self.steps.get(key)
        if known is None or said["at"] < known.at:
            self.steps[key] = LoggedStep(*key, said["at"], said["loss"], said["sample_hash"])

    def highest(self, generation: int) -> int:
        """Return the last step of a generation; 0 if there is none."""
        return max((step for of, step in self.steps if of == generation), default=0)

    def find(self, generation: int, step: int) -> LoggedStep | None:
        """Return a step of a generation, if it was done."""
        return self.steps.get((generation, step))

    def median_s(self, generation: int) -> float:
        """Return the median duration of a generation's last steps; it has done at least two."""
        ends = sorted(one.at for one in self.steps.values() if one.generation == generation)
        gaps = [after - before for before, after in pairwise(ends)]
        return statistics.median(gaps[-MEDIAN_OF:])

    def losses(self) -> dict[int, float]:
        """Return each step's loss, from the last generation that did it."""
        return {one.step: one.loss for _, one in sorted(self.steps.items())}
