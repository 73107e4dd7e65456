"""The cheapest pipelines under limits of stage time and synchronised bytes.

Under such limits a stage does best to take as many layers as it may, since that leaves less for the
others. For each limit, stages are laid from any layer onwards as far as each option reaches, and
the cheapest way to the last layer is kept, for several prices of GPU kinds at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.paper_search.family_bounds import OptionArrays
from planner.paper_search.formula_tables import LAYER_ROUNDING, PaperModel
from simulator.arrays import Floats, Ints
from simulator.estimate.paper_formula import MOST_TP_SHARING_GRADIENTS

Prices = NDArray[np.float32]


def cheapest_pipelines(
    model: PaperModel,
    arrays: OptionArrays,
    *,
    levels_s: Floats,
    gradient_bytes: Floats,
    prices: Floats,
    stages_max: int,
) -> Prices:
    """[stages - 1, limit, direction]: least price of a pipeline; infinite if impossible.

    Limits come in pairs: seconds of a stage per micro batch [limit], and the bytes that a group of
    a stage synchronises [kind, limit]. ``prices`` are [direction, option].
    """
    layers, options, limits = model.layers, len(arrays.options), len(levels_s)
    degrees = [min(option.tp, MOST_TP_SHARING_GRADIENTS) for option in arrays.options]
    within = np.stack(
        [
            np.minimum(
                _reach(arrays.seconds[o], levels_s - 2 * arrays.send_s[o]),
                _reach(model.gradient_bytes(), gradient_bytes[kind] * degree),
            )
            for o, (kind, degree) in enumerate(zip(arrays.kind, degrees, strict=True))
        ],
        axis=0,
    )
    synced = np.stack(
        [
            _reach(model.gradient_bytes(), gradient_bytes[kind] * degree, starts=1)[:, 0]
            for kind, degree in zip(arrays.kind, degrees, strict=True)
        ]
    )
    priced = prices.astype(np.float32)
    ways = len(prices)
    # One row per (limit, layer), and one more for impossible states.
    nowhere = limits * (layers + 1)
    cost = np.full((nowhere + 1, ways), np.inf, dtype=np.float32)
    cost[layers : nowhere : layers + 1] = 0.0
    base = np.arange(limits) * (layers + 1)
    here = np.arange(layers + 1)
    found = np.full((stages_max, limits, ways), np.inf, dtype=np.float32)
    buffer = np.empty((nowhere, ways), dtype=np.float32)
    for left in range(1, stages_max + 1):
        memory = _memory_reach(model, arrays, left)
        first = np.minimum(_first_reach(arrays, levels_s, left), synced)
        before, cost = cost, np.full_like(cost, np.inf)
        # Wide limits may leave no layers for the last stages, which are free then.
        cost[layers : nowhere : layers + 1] = 0.0
        for o in range(options):
            at = np.minimum(first[o], memory[o, 0])
            rows = np.where(at > 0, base + at, nowhere)
            np.minimum(found[left - 1], before[rows] + priced[:, o], out=found[left - 1])
            if left == stages_max:
                continue
            at = np.minimum(within[o], memory[o])
            rows = np.where(at > here, base[:, None] + at, nowhere).ravel()
            np.take(before, rows, axis=0, out=buffer)
            np.add(buffer, priced[:, o], out=buffer)
            np.minimum(cost[:-1], buffer, out=cost[:-1])
    return found


def _first_reach(arrays: OptionArrays, levels_s: Floats, left: int) -> Ints:
    """[option, limit] from layer 0: a first stage sends less, and nothing if it is the only one."""
    times = 0 if left == 1 else 1 if left <= 3 else 2
    return np.stack(
        [
            _reach(row, levels_s - (times * send_s if times else 0.0), starts=1)[:, 0]
            for row, send_s in zip(arrays.seconds, arrays.send_s, strict=True)
        ]
    )


def _memory_reach(model: PaperModel, arrays: OptionArrays, left: int) -> Ints:
    """[option, layer] as far as memory allows, with ``left`` stages left including this one."""
    return np.stack(
        [
            _reach(
                model.memory(option.tp, arrays.micro_batch, left), arrays.capacity_bytes[o : o + 1]
            )[0]
            for o, option in enumerate(arrays.options)
        ]
    )


def _reach(running: Floats, limits: Floats, *, starts: int | None = None) -> Ints:
    """The last boundary that each limit allows from each layer, by [limit, layer]."""
    ends = running[None, :starts] + np.maximum(limits, -1.0)[:, None]
    found = np.searchsorted(running, ends * (1 + LAYER_ROUNDING), side="right")
    return np.clip(found - 1, 0, len(running) - 1)
