"""Several data sets in exact proportions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from simulator.documents.problems import InputError, Problem

PERIOD_MAX = 100_000
"""The longest round after which a blend repeats its turns."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the data sets, and how many samples it gives in a round."""

    dataset: Any
    weight: int


class Blend:
    """Draws samples from several data sets, in turns.

    ``Blend((code, 0.7), (prose, 0.3))``: 7 of each 10 samples are code. Each data set has epochs of
    its own, in which each of its samples occurs once.
    """

    def __init__(self, *given: tuple[Any, float]) -> None:
        if not given:
            raise InputError(Problem("Blend", "has no data sets", "give pairs (data, weight)"))
        weights = []
        for number, (dataset, weight) in enumerate(given):
            place = f"Blend: data set {number}"
            if not weight > 0 or not math.isfinite(weight):
                raise InputError(Problem(place, f"has the weight {weight}", "give one above 0"))
            if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
                what = "has no len() or no samples by index"
                raise InputError(Problem(place, what, "blend data sets, not streams"))
            if len(dataset) == 0:
                raise InputError(Problem(place, "is empty", "leave it out"))
            weights.append(Fraction(str(weight)))
        # The smallest whole numbers in these proportions.
        whole = math.lcm(*(each.denominator for each in weights))
        numbers = [int(each * whole) for each in weights]
        common = math.gcd(*numbers)
        numbers = [each // common for each in numbers]
        if sum(numbers) > PERIOD_MAX:
            what = f"repeats its turns only after {sum(numbers):,} samples"
            raise InputError(Problem("Blend", what, "round the weights"))
        self.parts = tuple(
            Part(dataset, number) for (dataset, _), number in zip(given, numbers, strict=True)
        )
        self._turns = _turns(numbers)

    def turn(self, number: int) -> tuple[int, int]:
        """Return which data set gives the sample of this number, and how many it gave before."""
        rounds, place = divmod(number, len(self._turns))
        part, before = self._turns[place]
        return part, rounds * self.parts[part].weight + before


def _turns(weights: list[int]) -> list[tuple[int, int]]:
    """Spread the turns of a round evenly: next is the data set furthest below its share."""
    total, given = sum(weights), [0] * len(weights)
    turns = []
    for number in range(total):
        shares = (weight * (number + 1) for weight in weights)
        behind = [share - total * count for share, count in zip(shares, given, strict=True)]
        part = behind.index(max(behind))
        turns.append((part, given[part]))
        given[part] += 1
    return turns
