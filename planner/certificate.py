"""What no plan can beat: lower bounds that hold for every plan of the space.

The bounds of families are made tighter by limits: a plan's slowest stage and its largest sync
lie in one cell of a grid of limits, and a cell counts only if pipelines can be laid out at its
upper corner, on the best links there are, for every price of GPU kinds that is tried. What the
plan takes is then no less than at the cell's lower corner.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.families import Array, Family, Menu, cheapest_layers, distinct_rows, price_directions
from planner.limits import Limits
from planner.paper_model import PaperModel
from planner.reach import reach_table

LEVEL_RATIO = 1.03
LEVEL_RATIO_COST = 1.06
"""A cost hangs less on the slowest stage than a time does."""
SYNC_SHARES = (0.03, 0.05, 0.08, 0.12, 0.18, 0.25, 0.36, 0.5, 0.7, 1.0)
MULTIPLIERS = (0.0, 0.3, 1.0, 2.5)


@dataclass(frozen=True, slots=True)
class Bounds:
    """No plan within the limits iterates faster, or has a better objective."""

    seconds: float
    objective: float


def certify(
    model: PaperModel, families: list[Family], limits: Limits, *, seconds: float, objective: float
) -> Bounds:
    """Bounds over all families, given the best plan's figures: no bound is asked beyond them."""
    bounds = Bounds(seconds, objective)
    for family in sorted(families, key=lambda f: float(f.worth.min())):
        one = _family_bounds(model, family, limits, bounds)
        bounds = Bounds(min(bounds.seconds, one.seconds), min(bounds.objective, one.objective))
    return bounds


def _family_bounds(model: PaperModel, family: Family, limits: Limits, known: Bounds) -> Bounds:
    menu = family.menu
    beaten = family.worth < known.objective
    if not limits.goal_is_cost:
        rows, columns = np.nonzero(beaten)
    else:
        rows, columns = np.nonzero(beaten | (family.bounds < known.seconds))
    if not len(rows):
        return Bounds(math.inf, math.inf)
    most = np.ceil(model.global_batch // menu.micro_batch / family.replicas)[rows]
    stages, replicas = columns + 1, family.replicas[rows]
    levels = _levels(menu, int(stages.max()), float(most.min()), limits, known)
    sizes = family.rings.limits(SYNC_SHARES)
    directions = price_directions(len(menu.kinds))
    prices = directions[:, menu.kind] * menu.tp / menu.gpus[menu.kind]
    table = reach_table(
        model,
        menu,
        levels_s=levels,
        gradient_bytes=sizes,
        prices=np.concatenate([prices, menu.usd_per_s[None, :]]),
        stages_max=int(stages.max()),
    )
    possible = table.whole[..., : len(directions)].max(axis=-1)[columns]
    possible = possible * replicas[:, None, None] <= 1 + 1e-5
    usd_per_s = table.whole[..., -1][columns] * replicas[:, None, None] * (1 - 1e-5)
    below = _before(levels)
    used = np.array(sorted(set(rows.tolist())))
    whole = np.maximum(_whole_s(menu, levels, family.replicas, used)[rows], below)
    sync = family.rings.least_s(_before(sizes))[rows]
    low = (most - 1)[:, None, None] * below[:, None] + whole[:, :, None] + sync[:, None, :]
    low = np.maximum(low + menu.update_s, family.bounds[rows, columns][:, None, None])
    if limits.seconds_max is not None:
        possible &= low <= limits.seconds_max
    if limits.usd_max is not None:
        possible &= low * usd_per_s <= limits.usd_max
    if limits.objective.max_usd_per_hour is not None:
        possible &= usd_per_s * 3600 <= limits.objective.max_usd_per_hour
    seconds = np.where(possible, low, np.inf)
    if not limits.goal_is_cost:
        return Bounds(float(seconds.min()), float(seconds.min()))
    usd = np.maximum(low * usd_per_s, family.worth[rows, columns][:, None, None])
    return Bounds(float(seconds.min()), float(np.where(possible, usd, np.inf).min()))


def _levels(menu: Menu, stages: int, most: float, limits: Limits, known: Bounds) -> Array:
    """Limits of a stage's time from what is surely too little to what is surely enough."""
    high = float(menu.seconds[:, -1].max() + 2 * menu.send_s[np.isfinite(menu.send_s)].max())
    longest = limits.seconds_max if limits.goal_is_cost else known.seconds
    if longest is not None and math.isfinite(longest):
        high = min(high, longest / most)
    low = float(menu.seconds[:, -1].min()) / stages
    ratio = LEVEL_RATIO_COST if limits.goal_is_cost else LEVEL_RATIO
    steps = max(1, math.ceil(math.log(max(high / low, 1.001)) / math.log(ratio)))
    found: Array = high * ratio ** np.arange(-steps, 1.0)
    return found


def _whole_s(menu: Menu, levels: Array, every: Array, rows: NDArray[np.int64]) -> Array:
    """[replicas, level]: the least sum over stages of a pipeline's levels.

    A stage no slower than a limit takes at least its share of the limit in GPUs, so that the
    GPUs that there are bound from below how slow the options must be on average.
    """
    work = np.diff(menu.seconds, axis=1)
    distinct, times = distinct_rows(work.T)
    replicas = every[rows]
    best = np.zeros((len(rows), len(levels)))
    for direction, multiplier in itertools.product(price_directions(len(menu.kinds)), MULTIPLIERS):
        weight = direction[menu.kind] * menu.tp / menu.gpus[menu.kind]
        # [replicas, level, option]
        rate = 1 + multiplier * replicas[:, None, None] * weight / levels[None, :, None]
        layers = cheapest_layers(rate, distinct.T, times)
        best = np.maximum(best, layers - multiplier)
    found = np.zeros((len(every), len(levels)))
    found[rows] = best
    return found


def _before(limits: Array) -> Array:
    """The limit in front of each one."""
    return np.concatenate([np.zeros_like(limits[..., :1]), limits[..., :-1]], axis=-1)
