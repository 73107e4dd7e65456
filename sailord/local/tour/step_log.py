"""What the workers of a local cluster said that they have done: each step, when, and its loss.

A worker prints a line of JSON at the end of each step. They are read as they come, and stay
readable when the machine that wrote them is gone.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

LAST = 10
"""The median step is taken over so many."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step that is done, as the first that said so said it."""

    generation: int
    step: int
    at: float
    loss: float


@dataclass(eq=False)
class Ledger:
    """All steps of one job, in every generation that did them."""

    folder: Path
    job: str
    steps: dict[tuple[int, int], Step] = field(default_factory=dict)
    _read: dict[Path, int] = field(default_factory=dict)

    def look(self) -> None:
        """Read what was written since."""
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
        if said["job"] != self.job:
            return
        key = said["generation"], said["step"]
        known = self.steps.get(key)
        if known is None or said["at"] < known.at:
            self.steps[key] = Step(*key, said["at"], said["loss"])

    def highest(self, generation: int) -> int:
        """The last step that anybody has done in a generation; 0 if there is none."""
        return max((step for of, step in self.steps if of == generation), default=0)

    def end_of(self, generation: int, step: int) -> Step | None:
        """When a generation did a step, if it did."""
        return self.steps.get((generation, step))

    def median_s(self, generation: int) -> float:
        """How long a step took in a generation."""
        ends = sorted(one.at for one in self.steps.values() if one.generation == generation)
        gaps = [after - before for before, after in pairwise(ends)]
        return statistics.median(gaps[-LAST:])

    def losses(self) -> dict[int, float]:
        """Each step's loss, in the generation that did it for good: the last that did it."""
        return {one.step: one.loss for _, one in sorted(self.steps.items())}
