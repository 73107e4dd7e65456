"""Lower bounds of all plans under the paper's formula.

All plans of one micro batch size and a similar number of pipelines are tested at once: could one of
them take at most T seconds? T limits the slowest stage and the synchronisation, which share the
time in a few cells. If no pipelines fit the limits of any cell, on the best links and for every
price of GPU kinds that is tried, no plan is that fast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.paper_search.family_bounds import (
    Family,
    cheapest_layers,
    distinct_rows,
    price_directions,
)
from planner.paper_search.formula_tables import PaperModel
from planner.paper_search.pricing import cheapest_pipelines
from planner.problem.bounds import Bounds
from planner.problem.objective import Limits
from simulator.arrays import Floats, Ints

PRECISION = 0.01
"""Relative precision of the bounds."""
ROUNDS = 12
SYNC_CELLS = (0.0, 0.03, 0.06, 0.1, 0.15, 0.21, 0.28, 0.36, 0.46, 0.6, 1.0)
"""Shares of the time that synchronisation may take; cells lie between neighbours."""
SYNC_CELLS_FEW = (0.0, 0.1, 0.3, 1.0)
COST_RATIOS = (1.4, 1.12, 1.04)
"""Ratios between neighbouring times for a bound in dollars: coarse first, then refined."""
LONGEST_S = 1e9
"""A time longer than that of any plan."""
MULTIPLIERS = (0.3, 1.0, 2.5)
SINGLE_PRECISION = 1 + 1e-5
"""Tolerance for prices that are summed in single precision."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundRequest:
    """Groups of plans, as rows of a family, with the target seconds of each."""

    family: Family
    rows: Ints
    seconds: Floats
    at_least: Floats
    """Known lower bound of these plans' seconds."""


def lower_bounds(
    model: PaperModel, families: list[Family], limits: Limits, *, seconds: float, objective: float
) -> Bounds:
    """Return lower bounds of all families, at most the figures of the known plan."""
    ask = _Questions(model, limits)
    bounds = Bounds(seconds, objective)
    for family in sorted(families, key=lambda f: float(f.score.min())):
        if limits.needs_prices:
            least = ask.least_by_cells(family, bounds)
        else:
            least = ask.least_seconds(family, bounds.seconds)
        # Where dollars are the goal, seconds are bound by the families alone.
        quickest = float(family.bounds.min()) if limits.goal_is_cost else least
        bounds = Bounds(min(bounds.seconds, quickest), min(bounds.objective, least))
    return bounds


@dataclass(frozen=True, slots=True)
class _Questions:
    model: PaperModel
    limits: Limits

    def least_seconds(self, family: Family, known: float) -> float:
        """Bisect the seconds of all numbers of pipelines at once, up to ``PRECISION``."""
        low = family.bounds.min(axis=1)
        high = np.full(len(low), self._longest_s(known))
        if not np.isfinite(high).all():
            return float(low.min())
        # First test whether the known seconds can be met at all.
        rows = np.flatnonzero(low < high)
        tried = high[rows]
        for _ in range(ROUNDS):
            if not len(rows):
                break
            asked = BoundRequest(family, rows, tried, low[rows])
            possible = np.isfinite(self._usd(asked, SYNC_CELLS))
            high[rows[possible]] = tried[possible]
            low[rows[~possible]] = tried[~possible]
            least = float(high[low < high].min(initial=known))
            rows = np.flatnonzero((low < high * (1 - PRECISION)) & (low < least * (1 - PRECISION)))
            tried = np.sqrt(low[rows] * np.minimum(high[rows], least))
        return float(low.min())

    def least_by_cells(self, family: Family, known: Bounds) -> float:
        """Least objective where dollars count, by cells of the iteration time."""
        if not 0 < known.objective < math.inf:
            # Without a known plan, or with a free one, no cost limits the cells of time.
            return float(family.score.min())
        low = family.bounds.min(axis=1)
        longest = np.full(len(low), self._longest_s(known.seconds))
        if self.limits.goal_is_cost:
            longest[:] = self._longest_s(LONGEST_S)
            if self.limits.usd_max is None:
                # GPUs that hold the model must be paid for however long it takes, which limits the
                # time.
                every, forever = np.flatnonzero(np.isfinite(low)), np.full(len(low), LONGEST_S)
                asked = BoundRequest(family, every, forever[every], forever[every])
                rate = self._usd(asked, SYNC_CELLS_FEW[-2:]) / LONGEST_S
                held = np.isfinite(rate)
                ends = known.objective / np.maximum(rate[held], 1e-12)
                longest[every] = 0.0
                longest[every[held]] = np.minimum(ends, self._longest_s(LONGEST_S))
        rows = np.flatnonzero(low < longest)
        cells = (rows, low[rows], longest[rows])
        shares = SYNC_CELLS_FEW if self.limits.goal_is_cost else SYNC_CELLS
        least, others = 0.0, math.inf
        for ratio in COST_RATIOS:
            every, since, until = _divide_cells(*cells, ratio)
            usd = self._usd(BoundRequest(family, every, until, since), shares)
            score = usd if self.limits.goal_is_cost else since
            fine = np.isfinite(usd)
            every, since, until, score = every[fine], since[fine], until[fine], score[fine]
            least = max(least, min(others, float(score.min(initial=math.inf))))
            # Cells whose bound exceeds another cell's value need no refinement.
            near = score < (score * (until / since)).min(initial=known.objective)
            cells = (every[near], since[near], until[near])
            others = min(others, float(score[~near].min(initial=math.inf)))
        return least

    def _longest_s(self, known: float) -> float:
        most = self.limits.seconds_max
        return known if most is None else min(known, most)

    def _usd(self, asked: BoundRequest, shares: Sequence[float]) -> Floats:
        """Dollars of the cheapest plan within the target time; infinite if there is none."""
        family, arrays = asked.family, asked.family.arrays
        total = self.model.global_batch // arrays.micro_batch
        replicas = family.replicas[asked.rows]
        most = np.ceil(total / replicas)
        has_sync = replicas[:, None] > 1
        # [row, cell]
        sync_from = np.where(has_sync, asked.seconds[:, None] * np.array(shares[:-1]), 0.0)
        sync_until = asked.seconds[:, None] * np.array(shares[1:])
        cells = sync_from.shape
        row = np.repeat(np.arange(cells[0]), cells[1])
        left = (asked.seconds[:, None] - arrays.update_s - sync_from).ravel()
        rounds = (most - 1)[row]
        replica = replicas[row]
        # A pipeline takes the sum of its stages, slower for a narrower limit on each.
        level = (left - self._whole_s(family, np.full(len(row), np.inf), replica)) / np.maximum(
            rounds, 1e-9
        )
        level = np.minimum(level, left / (rounds + 1))
        for _ in range(2):
            whole = self._whole_s(family, level, replica)
            level = np.minimum(level, (left - whole) / np.maximum(rounds, 1e-9))
        kept = np.flatnonzero((level > 0) & (has_sync | (np.arange(cells[1]) == 0)).ravel())
        found = np.full(len(row), np.inf)
        if len(kept):
            found[kept] = self._find_cheapest(
                asked, row[kept], level[kept], sync_until.ravel()[kept]
            )
        least: Floats = found.reshape(cells).min(axis=1)
        return least

    def _find_cheapest(self, asked: BoundRequest, row: Ints, level: Floats, sync: Floats) -> Floats:
        family, arrays = asked.family, asked.family.arrays
        replicas = family.replicas[asked.rows][row]
        directions = price_directions(len(arrays.kinds))
        prices = directions[:, arrays.kind] * arrays.tp / arrays.gpus[arrays.kind]
        stages = np.minimum(arrays.gpus.sum() // replicas, self.model.layers).astype(int)
        sizes = np.stack(
            [family.rings.within(kind, asked.rows[row], sync) for kind in range(len(arrays.kinds))]
        )
        whole = cheapest_pipelines(
            self.model,
            arrays,
            levels_s=level,
            gradient_bytes=sizes,
            prices=np.concatenate([prices, arrays.usd_per_s[None, :]]),
            stages_max=int(stages.max()),
        )
        possible = whole[..., :-1].max(axis=-1) * replicas <= SINGLE_PRECISION
        usd_per_s = whole[..., -1] * replicas / SINGLE_PRECISION
        # A separate bound is known for each number of stages.
        taken = family.bounds[asked.rows[row], : len(whole)].T
        possible &= taken <= asked.seconds[row]
        with np.errstate(invalid="ignore"):
            usd = usd_per_s * np.maximum(taken, asked.at_least[row])
        if self.limits.usd_max is not None:
            possible &= usd <= self.limits.usd_max
        hourly = self.limits.objective.max_usd_per_hour
        if hourly is not None:
            possible &= usd_per_s * 3600 <= hourly
        if self.limits.goal_is_cost:
            usd = np.maximum(usd, family.score[asked.rows[row], : len(whole)].T)
        found: Floats = np.where(possible, usd, np.inf).min(axis=0)
        return found

    def _whole_s(self, family: Family, levels: Floats, replicas: Floats) -> Floats:
        """Least sum of a pipeline's stage times, under a limit on each.

        A stage within the limit needs at least its share of it in GPUs, so the GPUs available bound
        from below how slow the options are on average.
        """
        arrays = family.arrays
        distinct, times = distinct_rows(np.diff(arrays.seconds, axis=1).T)
        work = distinct.T
        best = np.full(len(levels), float(work.min(axis=0) @ times))
        for direction, multiplier in itertools.product(
            price_directions(len(arrays.kinds)), MULTIPLIERS
        ):
            weight = direction[arrays.kind] * arrays.tp / arrays.gpus[arrays.kind]
            with np.errstate(divide="ignore"):
                rate = 1 + multiplier * (replicas / np.maximum(levels, 1e-12))[:, None] * weight
            best = np.maximum(best, cheapest_layers(rate, work, times) - multiplier)
        return best


def _divide_cells(
    rows: Ints, since: Floats, until: Floats, ratio: float
) -> tuple[Ints, Floats, Floats]:
    """Cells of time divided into equal parts, each at most a ratio long."""
    parts = np.maximum(1, np.ceil(np.log(until / since) / math.log(ratio))).astype(int)
    every = np.repeat(np.arange(len(rows)), parts)
    part = np.arange(len(every)) - np.repeat(np.cumsum(parts) - parts, parts)
    step = (until / since) ** (1 / parts)
    begin = since[every] * step[every] ** part
    return rows[every], begin, begin * step[every]
