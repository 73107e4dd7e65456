"""Plans whose pipelines all have the same boundaries, in short form: runs of equal replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Run = tuple[int, int, int]
"""(lot, TP degree, number of adjacent replicas)."""


@dataclass(frozen=True, slots=True)
class PlanShape:
    """A plan in short form, whose pipelines all have the same boundaries."""

    micro_batch: int
    cuts: tuple[int, ...]
    """First layer of each stage, then the number of layers."""
    columns: tuple[tuple[Run, ...], ...]
    """The replicas of each stage, in the order of the pipelines."""

    @property
    def stages(self) -> int:
        """Stages of each pipeline."""
        return len(self.columns)

    @property
    def replicas(self) -> int:
        """Number of pipelines."""
        return sum(count for _, _, count in self.columns[0])


def paired(
    column: tuple[Run, ...], after: tuple[Run, ...], /
) -> Iterator[tuple[tuple[int, int], tuple[int, int], int, int]]:
    """Which (lot, TP) sends to which: sender, receiver, first pipeline, number of pipelines."""
    i = j = position = 0
    left, right = column[0][2], after[0][2]
    while True:
        count = min(left, right)
        yield column[i][:2], after[j][:2], position, count
        position += count
        left -= count
        right -= count
        if left == 0:
            i += 1
            if i == len(column):
                return
            left = column[i][2]
        if right == 0:
            j += 1
            right = after[j][2]
