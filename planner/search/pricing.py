"""The cheapest pipelines that run so many micro batches in a given time.

Prices stand on GPUs, so that a stage costs its price times its TP degree. A pipeline is built
from its last stage on: behind a stage stand ``k`` others, which settles what it holds in memory
and how long it waits. For each number of micro batches a stage does best to take as many layers
as it may; one program over layers answers for all numbers of micro batches at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.paper_search.family_bounds import Array

Ints = NDArray[np.int64]
EVERY = 64
"""Up to so many micro batches each number of them is looked at by itself."""
RATIO = 1.03
"""Beyond, numbers this close to each other are looked at as one."""


def batch_counts(most: int) -> Ints:
    """The numbers of micro batches that are looked at, from 1 on."""
    found = list(range(1, min(most, EVERY) + 1))
    while found[-1] < most:
        found.append(min(max(found[-1] + 1, int(found[-1] * RATIO)), most))
    return np.array(found)


@dataclass(frozen=True, eq=False)
class Reach:
    """How far stages get in some time: the furthest ends, for each number of micro batches."""

    counts: Ints
    furthest: Ints
    """[stages behind, choice, first layer, index of the count]."""

    @classmethod
    def of(cls, most: Array, counts: Ints) -> Reach:
        """From the most micro batches by [stages behind, choice, first layer, end]."""
        behind, choices, _, ends = most.shape
        layers = ends - 1
        index = np.searchsorted(counts, most[:, :, :layers].ravel(), side="right")
        index = index.reshape(-1, ends)
        furthest = np.zeros((len(index), len(counts) + 1), dtype=np.int64)
        rows = np.arange(len(index))
        for end in range(1, ends):
            furthest[rows, index[:, end]] = end
        furthest[:, 0] = 0
        # What can be run so often can be run less often.
        furthest = np.maximum.accumulate(furthest[:, ::-1], axis=1)[:, ::-1][:, 1:]
        return cls(counts, furthest.reshape(behind, choices, layers, len(counts)))

    def priced(self, prices: Array, *, stages_max: int, floor: Array | None = None) -> Priced:
        """The least price of a pipeline for each number of micro batches, or a floor of it."""
        furthest, levels = self.furthest, []
        layers = furthest.shape[2]
        column = np.arange(len(self.counts))
        # By [first layer or later, count], the least price of the stages so far; none yet.
        least = np.full((layers + 1, len(self.counts)), np.inf)
        least[layers] = 0.0
        best = np.full(len(self.counts), np.inf)
        for behind in range(stages_max):
            row = furthest[min(behind, len(furthest) - 1)]
            reached = least[row, column]
            exact = (prices[:, None, None] + reached).min(axis=0)
            levels.append(exact)
            least = np.concatenate([exact, np.full((1, len(self.counts)), np.inf)])
            least = np.minimum.accumulate(least, axis=0)
            best = np.minimum(best, exact[0])
            if (best <= (behind + 2) * prices.min()).all():
                break
        floors = best if floor is None else np.maximum(best, floor)
        return Priced(self, prices, tuple(levels), best, floors)


@dataclass(frozen=True, eq=False)
class Priced:
    """The cheapest pipelines at some prices."""

    reach: Reach
    prices: Array
    levels: tuple[Array, ...]
    least: Array
    """By index of the count."""
    floor: Array
    """The same, or more where something else says so."""

    @cached_property
    def hull(self) -> tuple[Array, Array]:
        """A convex curve that no pipeline's price is below: micro batches, and price there."""
        upto = np.append(self.reach.counts[1:] - 1, self.reach.counts[-1])
        points = [
            (float(n), float(price))
            for n, price in zip(upto, self.floor, strict=True)
            if np.isfinite(price)
        ]
        hull: list[tuple[float, float]] = []
        for x, y in points:
            while len(hull) > 1 and _is_above(hull[-2], hull[-1], (x, y)):
                hull.pop()
            hull.append((x, y))
        return np.array([x for x, _ in hull]), np.array([y for _, y in hull])

    def fleet_price(self, pipelines: Ints, total: int) -> Array:
        """The least price of so many pipelines that run so many micro batches together."""
        xs, ys = self.hull
        if not len(xs):
            return np.full(len(pipelines), np.inf)
        each = total / pipelines
        price = np.interp(each, xs, ys)
        return np.where(each > xs[-1], np.inf, price * pipelines)

    def cuts_of(self, index: int) -> tuple[tuple[int, int, int], ...] | None:
        """A cheapest pipeline for one count: (choice, first layer, end) of its stages."""
        behind = next(
            (k for k, level in enumerate(self.levels) if level[0, index] == self.least[index]), None
        )
        if behind is None or not np.isfinite(self.least[index]):
            return None
        furthest, layers, first, found = self.reach.furthest, self.reach.furthest.shape[2], 0, []
        while first < layers:
            ends = furthest[min(behind, len(furthest) - 1), :, first, index]
            prices = [
                self.prices[choice] + self._from(behind - 1, int(end), index)[0]
                for choice, end in enumerate(ends.tolist())
            ]
            choice = int(np.argmin(prices))
            end = self._from(behind - 1, int(ends[choice]), index)[1]
            if end <= first:
                return None
            found.append((choice, first, end))
            first, behind = end, behind - 1
        return tuple(found)

    def _from(self, behind: int, end: int, index: int) -> tuple[float, int]:
        """The least price of what follows, and the layer from which on it is the least."""
        if behind < 0:
            layers = self.reach.furthest.shape[2]
            return (0.0, layers) if end == layers else (np.inf, 0)
        column = self.levels[behind][: end + 1, index]
        least = float(column.min())
        return least, int(np.flatnonzero(column == least)[-1])


def _is_above(one: Sequence[float], other: Sequence[float], third: Sequence[float]) -> bool:
    """Whether the point in the middle lies on or above the line through the two others."""
    return (other[1] - one[1]) * (third[0] - one[0]) >= (third[1] - one[1]) * (other[0] - one[0])
