"""What a pipeline must cost to run so many micro batches in a given time, whatever its stages.

Under 1F1B the iteration is no shorter than one micro batch's way through the whole pipeline and
back, ``W``, and all the others on any one stage, but for the forwards that a stage with ``k``
others behind it may be ahead by: ``T >= W + (m - 1) w - k f``. Summed over the stages at the
prices of their GPUs, that bounds the work by what the GPUs have time for. Fast stages make ``W``
short and work dear, so that each layer is taken on the choice that serves both together best.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from planner.paper_search.family_bounds import Array
from planner.search.pricing import Ints
from planner.search.stage_limits import Times

HALVINGS = 8


def pipeline_prices(
    times: Times,
    prices: Array,
    counts: Ints,
    *,
    seconds: float,
    tail_s: float,
    stages_max: int,
    per_machine: int,
) -> Array:
    """The least price of a pipeline for each number of micro batches; inf where there is none.

    ``tail_s`` is what follows the last backward at the least.
    """
    stages = np.arange(1, stages_max + 1)[:, None]
    ahead = _Ahead(prices, counts, stages_max, _forward_share(times))
    hops_s = (stages - 1) * times.hop_s + (stages - 1) // per_machine * times.way_out_s
    left = seconds - tail_s - float(times.iteration_s.min()) - hops_s
    message_s = np.where(stages > 1, 2 * float(times.last_send.min()), 0.0)
    # The first layer may stand where most forwards are ahead, and the last one where none is.
    columns, repeats = np.unique(times.work[:, 1:], axis=1, return_counts=True)
    first_s = float(times.work[:, 0].min())

    def is_enough(price: Array) -> NDArray[np.bool_]:
        rounds = ahead.inverse_rounds(price)
        taken = message_s / rounds + first_s
        per_price = 1 / (price * rounds)
        for column, layers in zip(columns.T, repeats.tolist(), strict=True):
            least = np.full_like(price, np.inf)
            for work, rate in zip(column.tolist(), prices.tolist(), strict=True):
                least = np.minimum(least, work * (rate * per_price + 1))
            taken = taken + layers * least
        enough: NDArray[np.bool_] = taken <= left
        return enough

    low = np.broadcast_to(stages * prices.min(), (stages_max, len(counts)))
    high = np.broadcast_to(stages * prices.max(), low.shape)
    found: Array = _least_that(is_enough, low.astype(float), high.astype(float)).min(axis=0)
    return found


def _least_that(is_enough: Callable[[Array], NDArray[np.bool_]], low: Array, high: Array) -> Array:
    """From below, the least prices that are enough; inf where the highest are not."""
    possible, at_once = is_enough(high), is_enough(low)
    floor = low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = is_enough(middle)
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(at_once, floor, np.where(possible, low, np.inf))


def _forward_share(times: Times) -> float:
    """The most of a layer's work that is forward, the first layer and the last one apart."""
    inner = times.forward_work[:, 1:-1] / times.work[:, 1:-1]
    return float(inner.max(initial=0.0))


class _Ahead:
    """By how much forwards that are ahead ease a pipeline's rounds, at the very most."""

    def __init__(self, prices: Array, counts: Ints, stages_max: int, share: float) -> None:
        self.least, self.more = float(prices.min()), float(prices.max() - prices.min())
        behind = np.arange(stages_max)[:, None]
        rounds = counts[None, :] - 1 - share * behind
        with np.errstate(divide="ignore"):
            # By [stages behind, count]: a stage's share of the time per second of its work.
            self.each = np.where(rounds > 0, 1 / np.maximum(rounds, 1e-300), np.inf)
        self.sums = np.concatenate([np.zeros((1, len(counts))), np.cumsum(self.each, axis=0)])
        self.stages = np.arange(1, stages_max + 1)[:, None]
        self.column = np.arange(len(counts))[None, :]

    def inverse_rounds(self, price: Array) -> Array:
        """The mean over a pipeline's GPUs, the dearest stages being those furthest ahead."""
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
