"""What no plan can beat under the event estimator: all GPUs busy with what they do best.

Every layer of every micro batch takes some GPU-seconds of some kind. With weights on kinds that
sum to one over all GPUs, the iteration is no shorter than the work at the cheapest weighted
kind; any weights give a valid bound. Nor is it shorter than one micro batch's way through all
layers at the best speed. Messages, sync and bubbles only add to that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from planner.certificate import Bounds
from planner.families import Array, price_directions
from planner.limits import Limits
from planner.supply import Lot
from planner.templates import TemplateMaker
from simulator.platform import platform_of


def event_bounds(
    maker: TemplateMaker,
    lots: Sequence[Lot],
    limits: Limits,
    *,
    global_batch: int,
    micro_batches: Sequence[int],
    degrees: Sequence[int],
) -> Bounds:
    """Bounds of seconds and of the objective, over all micro batch sizes."""
    kinds = sorted({lot.gpu for lot in lots})
    gpus = np.array([sum(lot.gpus for lot in lots if lot.gpu == gpu) for gpu in kinds], dtype=float)
    prices = np.array(
        [min(lot.price_usd_per_gpu_hour or 0.0 for lot in lots if lot.gpu == gpu) for gpu in kinds]
    )
    fixed_s = min(platform_of(gpu).iteration_s for gpu in kinds)
    best_s = best_usd = math.inf
    for b in micro_batches:
        work, quickest = _work(maker, lots, kinds, b, degrees)
        count = global_batch // b
        seconds = max(
            float((weights[:, None] / gpus[:, None] * work).min(axis=0).sum()) * count
            for weights in price_directions(len(kinds))
        )
        seconds = max(seconds, quickest) + fixed_s
        usd = float((prices[:, None] / 3600 * work).min(axis=0).sum()) * count
        best_s, best_usd = min(best_s, seconds), min(best_usd, usd)
    # A hair off, for sums of floats in another order.
    best_s, best_usd = best_s * (1 - 1e-9), best_usd * (1 - 1e-9)
    return Bounds(best_s, best_usd if limits.goal_is_cost else best_s)


def _work(
    maker: TemplateMaker,
    lots: Sequence[Lot],
    kinds: Sequence[str],
    micro_batch: int,
    degrees: Sequence[int],
) -> tuple[Array, float]:
    """Least GPU-seconds by [kind, layer] of one micro batch, and its least time in sequence."""
    rows = []
    quickest = np.full(maker.costs.layer_count, np.inf)
    for gpu in kinds:
        row = np.full(maker.costs.layer_count, np.inf)
        for tp in degrees:
            if any(lot.gpu == gpu and lot.room(tp) for lot in lots):
                times = np.diff(maker.seconds(gpu, tp, micro_batch, "none"))
                row = np.minimum(row, tp * times)
                quickest = np.minimum(quickest, times)
        rows.append(row)
    return np.stack(rows), float(quickest.sum())
