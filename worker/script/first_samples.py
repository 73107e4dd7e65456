"""What the first samples of a data set show before training: their lengths, and their labels."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from worker.data.batch import DataSource
from worker.data.batch_tree import leaves_of
from worker.script.losses import label_count

LOOKED_AT = 64
"""How many samples are searched for the longest, and for two with different numbers of labels."""


def with_other_labels(data: DataSource, count: int) -> int | None:
    """Return one of the first samples with more or fewer labels than the first one has."""
    first = label_count(data.batch(0, [0]).inputs)
    for index in range(1, min(LOOKED_AT, count)):
        if label_count(data.batch(0, [index]).inputs) != first:
            return index
    return None


def lengths(data: DataSource, count: int) -> list[int]:
    """Return how many numbers each of the first samples has, as a batch of its own."""
    found = range(min(LOOKED_AT, count))
    return [_numbers(data.batch(0, [index]).inputs) for index in found]


def note_of(found: list[int]) -> list[str]:
    """Note for which samples costs are planned, if lengths differ."""
    if len(set(found)) == 1:
        return []
    what = f"samples have {min(found):,} to {max(found):,} numbers"
    return [f"{what}: costs are planned for the longest of the first {len(found)}"]


def _numbers(batch: Any) -> int:
    return sum(math.prod(each.shape) for each in leaves_of(batch) if isinstance(each, Tensor))
