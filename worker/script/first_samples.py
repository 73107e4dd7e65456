"""What the first samples of a data set show before training: their lengths, and their labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.data.batch import DataSource
from worker.data.batch_tree import leaves_of
from worker.script.losses import label_count

LOOKED_AT = 64
"""How many samples are searched for the longest, and for some that are unlike the first."""


def unlike_first(data: DataSource, count: int) -> list[int]:
    """Return samples that a mean over a batch may weight otherwise than the first sample.

    They are one of the first samples with more or fewer labels than it, and the one of these and
    the last sample that differs most from it in its class, masks and padding.
    """
    first = data.batch(0, [0]).inputs
    labels, numbers = label_count(first), _count_numbers(first)
    other, unlike, most = None, None, (0, 0)
    for index in sorted({*range(1, min(LOOKED_AT, count)), max(count - 1, 0)}):
        batch = data.batch(0, [index]).inputs
        if other is None and index < LOOKED_AT and label_count(batch) != labels:
            other = index
        found = _difference(_count_numbers(batch), numbers)
        if found > most:
            unlike, most = index, found
    return sorted({index for index in (other, unlike) if index is not None})


def _count_numbers(batch: Any) -> list[Counter[float]]:
    """Count the numbers in each tensor of a sample; images are left out."""
    tensors = (each for each in leaves_of(batch) if isinstance(each, Tensor) and each.dim() <= 2)
    return [Counter(each.flatten().tolist()) for each in tensors]


def _difference(some: list[Counter[float]], others: list[Counter[float]]) -> tuple[int, int]:
    """Return how many single numbers differ, and then for how many more places one number stands.

    A class is a single number; padding and masks repeat one.
    """
    singles = repeated = 0
    for one, other in zip(some, others, strict=False):
        if one.total() == other.total() == 1:
            singles += one != other
        else:
            repeated += max(((one - other) + (other - one)).values(), default=0)
    return singles, repeated


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many numbers each of the first samples has, and how many tokens, if it has tokens."""

    numbers: tuple[int, ...] = (0,)
    tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, data: DataSource, count: int) -> Lengths:
        """Read the first samples, each as a batch of its own."""
        found = [data.batch(0, [index]).inputs for index in range(min(LOOKED_AT, count))]
        texts = [each.get("input_ids") if isinstance(each, Mapping) else None for each in found]
        tokens = tuple(each.numel() for each in texts if isinstance(each, Tensor))
        return cls(tuple(map(_numbers, found)), tokens if len(tokens) == len(found) else ())

    @property
    def longest(self) -> int:
        """The index of the longest sample."""
        return self.numbers.index(max(self.numbers))

    @property
    def notes(self) -> list[str]:
        """For which samples costs are planned, if lengths differ."""
        if len(set(self.numbers)) == 1:
            return []
        counts, unit = (self.tokens, "tokens") if self.tokens else (self.numbers, "numbers")
        what = f"samples have {min(counts):,} to {max(counts):,} {unit}"
        return [f"{what}: costs are planned for the longest of the first {len(counts)}"]


def _numbers(batch: Any) -> int:
    return sum(math.prod(each.shape) for each in leaves_of(batch) if isinstance(each, Tensor))
