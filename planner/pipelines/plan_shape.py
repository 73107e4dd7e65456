"""Plans whose pipelines all have the same boundaries, in short form: runs of equal replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Run = tuple[int, int, int]
"""(lot, TP degree, how many replicas in a row)."""


@dataclass(frozen=True, slots=True)
class PlanShape:
    """A plan in short form: all pipelines have the same boundaries."""

    micro_batch: int
    cuts: tuple[int, ...]
    """First layer of each stage, and the number of layers."""
    columns: tuple[tuple[Run, ...], ...]
    """Per stage, its replicas in the order of the pipelines."""

    @property
    def stages(self) -> int:
        return len(self.columns)

    @property
    def replicas(self) -> int:
        return sum(count for _, _, count in self.columns[0])


def paired(
    column: tuple[Run, ...], after: tuple[Run, ...], /
) -> Iterator[tuple[tuple[int, int], tuple[int, int], int, int]]:
    """Which (lot, TP) sends to which, with the first pipeline of the run and its length."""
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
