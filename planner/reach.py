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

Prices = NDArray[np.float32]
Reach = NDArray[np.int64]
_HAIR = 1e-12
"""Sums of floats differ in their last digits; that must not cost a layer."""


@dataclass(frozen=True, slots=True, eq=False)
class ReachTable:
    """The price of a pipeline, by limits, prices and number of stages."""

    menu: Menu
    levels_s: Array
    """Limits of a stage's seconds per micro batch, ascending."""
    gradient_bytes: Array
    """[kind, limit]: limits of what a group of a stage syncs, ascending."""
    prices: Prices
    """[option, direction]."""
    whole: Prices
    """[stages - 1, level, bytes, direction]: the price of one pipeline, infinite if impossible."""
    _reach: list[Reach]
    """Per stages left: [level, bytes, option, layer]."""
    _first: list[Reach]
    """The same for the stage at layer 0, if it is the first: [level, bytes, option]."""
    _cost: list[Prices]
    """Per stages left: [level, bytes, layer, direction]."""

    def cuts(self, stages: int, level: int, size: int, direction: int) -> tuple[int, ...]:
        """Boundaries of the cheapest pipeline."""
        cuts = [0]
        for left in range(stages, 0, -1):
            at = (
                self._first[left - 1][level, size]
                if left == stages
                else self._reach[left - 1][level, size, :, cuts[-1]]
            )
            cost = self._cost[left - 1][level, size, at, direction] + self.prices[:, direction]
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
    layers, options = model.layers, len(menu.options)
    plain = np.stack(
        [_reach(menu.seconds[o], levels_s - 2 * menu.send_s[o]) for o in range(options)], axis=1
    )
    degrees = [min(option.tp, MOST_TP_SHARING_GRADIENTS) for option in menu.options]
    sync = np.stack(
        [
            _reach(model.gradient_bytes(), gradient_bytes[kind] * degree)
            for kind, degree in zip(menu.kind, degrees, strict=True)
        ],
        axis=1,
    )
    priced = prices.T.astype(np.float32)
    shape = (len(levels_s), gradient_bytes.shape[1])
    limits, ways = shape[0] * shape[1], prices.shape[0]
    # One row per (limits, layer), and one more for what cannot be.
    cost = np.full((limits * (layers + 1) + 1, ways), np.inf, dtype=np.float32)
    cost[layers : limits * (layers + 1) : layers + 1] = 0.0
    base = (np.arange(limits) * (layers + 1)).reshape(*shape, 1)
    here = np.arange(layers + 1)
    costs, reaches, firsts, wholes = [cost], [], [], []
    buffer = np.empty((limits * (layers + 1), ways), dtype=np.float32)
    for left in range(1, stages_max + 1):
        memory = _memory_reach(model, menu, left)
        limit = np.minimum(sync[None], memory[None, None])
        reach = np.minimum(plain[:, None], limit)
        first = np.minimum(_first_reach(menu, levels_s, left)[:, None], limit[..., 0])
        before, nowhere = costs[-1], limits * (layers + 1)
        cost = np.full_like(before, np.inf)
        whole = np.full((limits, ways), np.inf, dtype=np.float32)
        for o in range(options):
            at = reach[:, :, o]
            rows = np.where(at > here, base + at, nowhere).ravel()
            np.take(before, rows, axis=0, out=buffer)
            np.add(buffer, priced[o], out=buffer)
            np.minimum(cost[:-1], buffer, out=cost[:-1])
            at = first[:, :, o]
            rows = np.where(at > 0, base[..., 0] + at, nowhere).ravel()
            np.minimum(whole, before[rows] + priced[o], out=whole)
        costs.append(cost)
        reaches.append(reach)
        firsts.append(first)
        wholes.append(whole.reshape(*shape, ways))
    return ReachTable(
        menu,
        levels_s,
        gradient_bytes,
        priced,
        np.stack(wholes),
        reaches,
        firsts,
        [each[:-1].reshape(*shape, layers + 1, ways) for each in costs],
    )


def _first_reach(menu: Menu, levels_s: Array, left: int) -> Reach:
    """[level, option] from layer 0: a first stage sends less, and nothing if it is the only one."""
    times = 0 if left == 1 else 1 if left <= 3 else 2
    return np.stack(
        [
            _reach(row, levels_s - (times * send_s if times else 0.0), starts=1)[:, 0]
            for row, send_s in zip(menu.seconds, menu.send_s, strict=True)
        ],
        axis=1,
    )


def _memory_reach(model: PaperModel, menu: Menu, left: int) -> Reach:
    """[option, layer] as far as memory goes, with so many stages left, this one included."""
    return np.stack(
        [
            _reach(model.memory(option.tp, menu.micro_batch, left), menu.capacity_bytes[o : o + 1])[
                0
            ]
            for o, option in enumerate(menu.options)
        ]
    )


def _reach(running: Array, limits: Array, *, starts: int | None = None) -> Reach:
    """[limit, layer]: the last boundary such that what lies between stays within the limit."""
    ends = running[None, :starts] + np.maximum(limits, -1.0)[:, None]
    found = np.searchsorted(running, ends * (1 + _HAIR), side="right")
    return np.clip(found - 1, 0, len(running) - 1)
