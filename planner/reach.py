"""How far a stage reaches: boundaries for every time limit at once, by a program over layers.

If a stage may take so long per micro batch and hold so many gradients, then the best it can do
is to take as many layers as it may: whatever follows has only less to do. So for each limit the
stages are laid from any layer onwards as far as each option reaches, and the cheapest way to
the last layer is kept, for several prices of the GPU kinds at a time. Nothing in it depends on
the number of replicas, so one table answers for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.families import Array, Menu
from planner.paper_model import PaperModel
from simulator.paper import MOST_TP_SHARING_GRADIENTS


@dataclass(frozen=True, slots=True, eq=False)
class ReachTable:
    """The price of a pipeline, by limits, prices and number of stages."""

    menu: Menu
    levels_s: Array
    """Limits of a stage's seconds per micro batch, ascending."""
    gradient_bytes: Array
    """Limits of what a group of a stage syncs, ascending."""
    prices: Array
    """[direction, option]."""
    whole: Array
    """[stages - 1, level, bytes, direction]: the price of one pipeline, infinite if impossible."""
    _reach: list[NDArray[np.int64]]
    """Per stages left: [level, bytes, option, layer]."""
    _cost: list[Array]
    """Per stages left: [level, bytes, direction, layer]."""
    _first: list[NDArray[np.int64]]

    def cuts(self, stages: int, level: int, size: int, direction: int) -> tuple[int, ...]:
        """Boundaries of the cheapest pipeline."""
        cuts = [0]
        for left in range(stages, 0, -1):
            reach = (self._first[left - 1] if left == stages else self._reach[left - 1])[
                level, size
            ]
            at = reach[:] if left == stages else reach[:, cuts[-1]]
            cost = self.prices[direction] + self._cost[left - 1][level, size, direction][at]
            cost = np.where(at > cuts[-1], cost, np.inf)
            cuts.append(int(at[int(np.argmin(cost))]))
        return tuple(cuts)


def reach_table(
    model: PaperModel,
    menu: Menu,
    *,
    levels_s: Array,
    gradient_bytes: Array,
    prices: Array,
    stages_max: int,
) -> ReachTable:
    """Lay out pipelines of up to ``stages_max`` stages for all limits and prices."""
    layers = model.layers
    options = len(menu.options)
    compute = [
        _reach(menu.seconds[o], np.maximum(levels_s - 2 * menu.send_s[o], -1.0))
        for o in range(options)
    ]
    plain = np.stack(compute, axis=1)
    sync = np.stack(
        [
            _reach(model.gradient_bytes(), gradient_bytes * min(tp, MOST_TP_SHARING_GRADIENTS))
            for tp in (o.tp for o in menu.options)
        ],
        axis=1,
    )
    shape = (len(levels_s), len(gradient_bytes), len(prices), layers + 1)
    cost = np.full(shape, np.inf)
    cost[..., layers] = 0.0
    costs, reaches, firsts, wholes = [cost], [], [], []
    level_index = np.arange(len(levels_s))[:, None, None]
    size_index = np.arange(len(gradient_bytes))[None, :, None]
    here = np.arange(layers + 1)
    for left in range(1, stages_max + 1):
        memory = np.stack(
            [
                _reach(
                    model.memory(option.tp, menu.micro_batch, left),
                    np.array([menu.capacity_bytes[o]]),
                )[0]
                for o, option in enumerate(menu.options)
            ]
        )
        limit = np.minimum(sync[None], memory[None, None])
        reach = np.minimum(plain[:, None], limit)
        # A first stage sends less: nothing if it is the only one, one way only among few.
        first_sends = 0.0 if left == 1 else menu.send_s * (1 if left <= 3 else 2)
        first = np.stack(
            [
                np.searchsorted(menu.seconds[o], levels_s - s, side="right") - 1
                for o, s in enumerate(np.broadcast_to(first_sends, (options,)))
            ],
            axis=1,
        )
        first = np.clip(np.minimum(first[:, None], limit[..., 0]), 0, layers)
        before = costs[-1]
        whole = np.full(shape[:-1], np.inf)
        cost = np.full(shape, np.inf)
        for o in range(options):
            at = reach[:, :, o]
            for d in range(len(prices)):
                priced = before[level_index, size_index, d, at] + prices[d, o]
                priced[at <= here] = np.inf
                np.minimum(cost[:, :, d], priced, out=cost[:, :, d])
                start = before[level_index[..., 0], size_index[..., 0], d, first[:, :, o]]
                start = np.where(first[:, :, o] > 0, start + prices[d, o], np.inf)
                np.minimum(whole[:, :, d], start, out=whole[:, :, d])
        costs.append(cost)
        reaches.append(reach)
        firsts.append(first)
        wholes.append(whole)
    return ReachTable(
        menu, levels_s, gradient_bytes, prices, np.stack(wholes), reaches, costs, firsts
    )


def _reach(running: Array, limits: Array) -> NDArray[np.int64]:
    """[limit, layer]: the last boundary such that what lies between stays within the limit."""
    # A hair of tolerance: sums of floats differ in their last digits.
    found = np.searchsorted(
        running, (running[None, :] + limits[:, None]) * (1 + 1e-12), side="right"
    )
    return np.clip(found - 1, 0, len(running) - 1)
