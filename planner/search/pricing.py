"""The cheapest pipelines that run a number of micro batches within a given time.

Prices are weights of GPU kinds that the caller gives (the bound's dual values), not dollars. They
are per GPU, so a stage costs its price times its TP degree. A pipeline is built from its last stage
on: the number ``k`` of stages behind a stage determines its memory and its waiting time. For a
given number of micro batches each stage takes as many layers as it may; one dynamic program
over layers solves all numbers of micro batches at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.search.stage_limits import StageTimeTables
from planner.search.stage_times import Times
from simulator.arrays import Bools, Floats, Ints

EVERY = 64
"""Largest number of micro batches up to which each number is solved by itself."""
RATIO = 1.03
"""Above ``EVERY``, numbers within this ratio are treated as one."""
HALVINGS = 8
"""Bisection steps for the price of a pipeline."""
FOREVER_S = 1e15
"""A time limit that no plan reaches."""


def batch_counts(most: int) -> Ints:
    """The numbers of micro batches that are solved, from 1 on."""
    found = list(range(1, min(most, EVERY) + 1))
    while found[-1] < most:
        found.append(min(max(found[-1] + 1, int(found[-1] * RATIO)), most))
    return np.array(found)


@dataclass(frozen=True, eq=False)
class Reach:
    """How far stages reach within a time: their furthest ends, per number of micro batches."""

    counts: Ints
    furthest: Ints
    """By [stages behind, choice, first layer, index of the count]."""

    @classmethod
    def of(cls, most: Floats, counts: Ints) -> Reach:
        """Build it from the most micro batches by [stages behind, choice, first layer, end]."""
        behind, choices, _, ends = most.shape
        layers = ends - 1
        index = np.searchsorted(counts, most[:, :, :layers].ravel(), side="right")
        index = index.reshape(-1, ends)
        furthest = np.zeros((len(index), len(counts) + 1), dtype=np.int64)
        rows = np.arange(len(index))
        for end in range(1, ends):
            furthest[rows, index[:, end]] = end
        furthest[:, 0] = 0
        # A stage that can run n micro batches can run fewer.
        furthest = np.maximum.accumulate(furthest[:, ::-1], axis=1)[:, ::-1][:, 1:]
        return cls(counts, furthest.reshape(behind, choices, layers, len(counts)))

    def priced(self, prices: Floats, *, stages_max: int, floor: Floats | None = None) -> Priced:
        """The least price of a pipeline per number of micro batches, or a lower bound."""
        furthest, levels = self.furthest, []
        layers = furthest.shape[2]
        column = np.arange(len(self.counts))
        # By [first layer or later, count]: least price of the stages laid so far, 0 at the start.
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
        tables = best if floor is None else np.maximum(best, floor)
        return Priced(self, prices, tuple(levels), best, tables)


@dataclass(frozen=True, eq=False)
class Priced:
    """The cheapest pipelines at given prices."""

    reach: Reach
    prices: Floats
    levels: tuple[Floats, ...]
    least: Floats
    """Least price of a pipeline by the index of its number of micro batches."""
    floor: Floats
    """``least``, or a higher bound where one is given."""

    @cached_property
    def hull(self) -> tuple[Floats, Floats]:
        """The lower convex hull of the prices: micro batches, and the price there."""
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

    def pipelines_price(self, pipelines: Ints, total: int) -> Floats:
        """Lower bound of the price of ``pipelines`` pipelines that run ``total`` micro batches
        together.
        """
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
                self.prices[choice] + self._price_from(behind - 1, int(end), index)[0]
                for choice, end in enumerate(ends.tolist())
            ]
            choice = int(np.argmin(prices))
            end = self._price_from(behind - 1, int(ends[choice]), index)[1]
            if end <= first:
                return None
            found.append((choice, first, end))
            first, behind = end, behind - 1
        return tuple(found)

    def _price_from(self, behind: int, end: int, index: int) -> tuple[float, int]:
        """Least price of the stages that follow, and the layer from which it is reached."""
        if behind < 0:
            layers = self.reach.furthest.shape[2]
            return (0.0, layers) if end == layers else (np.inf, 0)
        column = self.levels[behind][: end + 1, index]
        least = float(column.min())
        return least, int(np.flatnonzero(column == least)[-1])


def _is_above(one: Sequence[float], other: Sequence[float], third: Sequence[float]) -> bool:
    """Whether the middle point lies on or above the line through the other two."""
    return (other[1] - one[1]) * (third[0] - one[0]) >= (third[1] - one[1]) * (other[0] - one[0])


def share_out(counts: Ints, price: Floats, pipelines: int, total: int) -> tuple[float, list[int]]:
    """Least price of pipelines that run ``total`` micro batches, and an index of each's count.

    Each runs one micro batch or more. A pipeline with a number of micro batches between two counts
    has the price of the lower one. The least price of several is the min-plus convolution of their
    prices over the micro batches.
    """
    index = np.searchsorted(counts, np.arange(total + 1), side="right") - 1
    each = np.where(index >= 0, price[index], np.inf)
    each[max(1, total - pipelines + 2) :] = np.inf
    tables: dict[int, Floats] = {1: each}

    def of(number: int) -> Floats:
        if number not in tables:
            tables[number] = _min_plus(of(number // 2), of(number - number // 2))
        return tables[number]

    def parts(number: int, share: int) -> set[int]:
        if number == 1:
            return {int(index[share])}
        one, other = of(number // 2)[: share + 1], of(number - number // 2)[share::-1]
        split = int(np.argmin(one + other))
        return parts(number // 2, split) | parts(number - number // 2, share - split)

    least = float(of(pipelines)[total])
    return least, sorted(parts(pipelines, total)) if math.isfinite(least) else []


def _min_plus(one: Floats, other: Floats) -> Floats:
    """Least sum of a price from each table, by the sum of their indices."""
    found = np.full(len(one), np.inf)
    for index in np.flatnonzero(np.isfinite(one)).tolist():
        rest = found[index:]
        np.minimum(rest, one[index] + other[: len(rest)], out=rest)
    return found


def fewest_gpus(tables: StageTimeTables, micro_batches: Sequence[int], gpus: int) -> float:
    """GPUs of the smallest pipeline, at most ``gpus``; infinite if even these are too few.

    All GPU kinds count alike, as if each were available in any number. This proves a job
    infeasible.
    """
    prices = np.array([float(choice.tp) for choice in tables.choices])
    stages_max = min(tables.costs.layer_count, gpus)
    least = np.inf
    for b in micro_batches:
        # One micro batch needs the least memory; sharded optimizer states may be smallest with many
        # pipelines.
        for pipelines in (1, gpus):
            most = tables.most(b, FOREVER_S, pipelines, pipelines)
            priced = Reach.of(most, batch_counts(1)).priced(prices, stages_max=stages_max)
            least = min(least, float(priced.least[0]))
    return float(least) if least <= gpus else np.inf


def pipeline_prices(
    times: Times,
    prices: Floats,
    counts: Ints,
    *,
    seconds: float,
    tail_s: float,
    stages_max: int,
    per_machine: int,
) -> Floats:
    """Lower bound of a pipeline's price for each number of micro batches; infinite if impossible.

    Under 1F1B the iteration lasts at least the round trip ``W`` of one micro batch through the
    pipeline, plus the other micro batches on any one stage, less the forwards that a stage with
    ``k`` stages behind it may run ahead: ``T >= W + (m - 1) w - k f``. Summed over the stages at
    the prices of their GPUs, this bounds the work by the time that the GPUs have. Fast stages
    shorten ``W`` and make work dearer, so each layer takes the choice that is best for both
    together.

    ``tail_s`` is the least time between the last backward and the end of the iteration.

    With divided backwards the gradients of weights also shorten it, by as many as a stage has
    stages before it; the bound is 0 then.
    """
    if times.is_divided:
        return np.zeros(len(counts))
    stages = np.arange(1, stages_max + 1)[:, None]
    ahead = _Ahead(prices, counts, stages_max, _forward_share(times))
    hops_s = (stages - 1) * times.hop_s + (stages - 1) // per_machine * times.leave_machine_s
    left = seconds - tail_s - float(times.iteration_s.min()) - hops_s
    message_s = np.where(stages > 1, 2 * float(times.last_send.min()), 0.0)
    # The first layer may be on the stage that runs furthest ahead, the last layer on one that does
    # not.
    columns, repeats = np.unique(times.work[:, 1:], axis=1, return_counts=True)
    first_s = float(times.work[:, 0].min())

    def is_enough(price: Floats) -> Bools:
        rounds = ahead.inverse_rounds(price)
        taken = message_s / rounds + first_s
        per_price = 1 / (price * rounds)
        for column, layers in zip(columns.T, repeats.tolist(), strict=True):
            least = np.full_like(price, np.inf)
            for work, rate in zip(column.tolist(), prices.tolist(), strict=True):
                least = np.minimum(least, work * (rate * per_price + 1))
            taken = taken + layers * least
        enough: Bools = taken <= left
        return enough

    low = np.broadcast_to(stages * prices.min(), (stages_max, len(counts)))
    high = np.broadcast_to(stages * prices.max(), low.shape)
    found: Floats = _find_least(is_enough, low.astype(float), high.astype(float)).min(axis=0)
    return found


def _find_least(is_enough: Callable[[Floats], Bools], low: Floats, high: Floats) -> Floats:
    """The least prices that suffice, approached from below; infinite where the highest do not."""
    possible, at_once = is_enough(high), is_enough(low)
    floor = low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = is_enough(middle)
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(at_once, floor, np.where(possible, low, np.inf))


def _forward_share(times: Times) -> float:
    """The largest share of the forward pass in an inner layer's work."""
    inner = times.forward_work[:, 1:-1] / times.work[:, 1:-1]
    return float(inner.max(initial=0.0))


class _Ahead:
    """Upper bound of how much the forwards that run ahead shorten a pipeline's rounds."""

    def __init__(self, prices: Floats, counts: Ints, stages_max: int, share: float) -> None:
        self.least, self.more = float(prices.min()), float(prices.max() - prices.min())
        behind = np.arange(stages_max)[:, None]
        rounds = counts[None, :] - 1 - share * behind
        with np.errstate(divide="ignore"):
            # By [stages behind, count]: share of the time per second of a stage's work.
            self.each = np.where(rounds > 0, 1 / np.maximum(rounds, 1e-300), np.inf)
        self.sums = np.concatenate([np.zeros((1, len(counts))), np.cumsum(self.each, axis=0)])
        self.stages = np.arange(1, stages_max + 1)[:, None]
        self.column = np.arange(len(counts))[None, :]

    def inverse_rounds(self, price: Floats) -> Floats:
        """Mean over a pipeline's GPUs, with the dearest stages furthest ahead."""
        stages, sums = self.stages, self.sums
        rest = np.maximum(price - stages * self.least, 0.0)
        full = np.zeros(price.shape, dtype=np.int64)
        if self.more > 0:
            full = np.minimum((rest / self.more).astype(np.int64), stages)
        whole = np.broadcast_to(sums[1:], price.shape)
        below = sums[stages - full, self.column]
        part = self.each[np.maximum(stages - full - 1, 0), self.column]
        with np.errstate(invalid="ignore"):
            total = self.least * whole + self.more * (whole - below)
            total = total + (rest - full * self.more) * part
        return np.where(np.isfinite(total), total / price, np.inf)
