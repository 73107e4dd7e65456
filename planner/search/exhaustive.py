"""All plans of a small case under the event estimator, ordered by lower bound.

Pipelines may differ in everything. All stage sequences that the GPUs allow are listed with their
least time for each number of micro batches (``stage_limits``). Those that may be as good as the
best known plan are combined into sets that fit the GPUs, and the micro batches are shared out in
all ways that may still be as good. The search judges the result in the order of its bounds.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.pipelines.pipeline_template import Template, stage_options
from planner.pipelines.stage_memory import TemplateStage
from planner.problem.bounds import ROUNDING, TooManyPlansError
from planner.problem.inventory import Lot, lots_hold
from planner.problem.objective import Limits
from planner.search.stage_limits import StageTimeTables
from simulator.arrays import Floats, Ints
from simulator.spec.job import RecomputePolicy

GPUS_MAX = 6
"""Larger clusters are not searched exhaustively."""
ORDERS_MAX = 4000
"""Most sequences of stages, without boundaries."""
ENTRIES_MAX = 1_500_000
"""Most entries of the table of pipelines by micro batches."""
WORK_MAX = 100_000
"""Most sets of pipelines and ways to share out micro batches."""
ORDER_WORK = 10
"""Work counted for one sequence of stages."""

_Groups = tuple[tuple[tuple[int, int], int], ...]
"""Number of groups by (lot, TP degree), sorted."""


@dataclass(frozen=True, slots=True)
class BoundedPipeline:
    """A pipeline's stages, and its least seconds for 1, 2, ... micro batches."""

    stages: tuple[TemplateStage, ...]
    cuts: tuple[int, ...]
    least_s: list[float] = field(compare=False)


@dataclass(frozen=True, slots=True)
class BoundedMix:
    """Pipelines with their micro batches, and a lower bound of their objective."""

    least: float
    micro_batch: int
    lines: tuple[BoundedPipeline, ...]
    counts: tuple[int, ...]

    def templates(self, tables: StageTimeTables) -> tuple[Template, ...]:
        """The template of each pipeline."""
        made = tables.maker.timed
        return tuple(made(line.stages, self.micro_batch, line.cuts) for line in self.lines)


def all_bounded_mixes(
    tables: StageTimeTables,
    recompute: RecomputePolicy,
    degrees: Sequence[int],
    limits: Limits,
    *,
    micro_batches: Sequence[int],
    global_batch: int,
    known: float | None,
) -> list[BoundedMix] | None:
    """All plans whose bound is at most ``known``, by bound; ``None`` if too many."""
    lots = tables.lots
    gpus = sum(lot.gpus for lot in lots)
    if gpus > GPUS_MAX:
        return None
    options = stage_options(lots, range(len(lots)), degrees, recompute)
    found: list[BoundedMix] = []
    work = _Work()
    try:
        orders = _orders(options, lots, min(tables.costs.layer_count, gpus))
        for b in micro_batches:
            total = global_batch // b
            for pipelines in range(1, min(total, gpus) + 1):
                # Each of the other pipelines needs at least one GPU.
                some = [one for one in orders if _gpus(one[1]) <= gpus - pipelines + 1]
                enumerator = _Enumerator(tables, limits, some, b, total, pipelines, known, work)
                found += enumerator.bounded_mixes()
    except TooManyPlansError:
        return None
    found.sort(key=lambda bounded: bounded.least)
    return found


def _orders(
    options: Sequence[TemplateStage], lots: Sequence[Lot], stages_max: int
) -> list[tuple[tuple[TemplateStage, ...], _Groups]]:
    """All sequences of stages that the lots can hold, with their groups."""
    found: list[tuple[tuple[TemplateStage, ...], _Groups]] = []
    last: list[tuple[TemplateStage, ...]] = [()]
    for _ in range(stages_max):
        longer = []
        for stages in last:
            for stage in options:
                groups = Counter((each.lot, each.tp) for each in (*stages, stage))
                if _fit_together(groups, lots):
                    longer.append((*stages, stage))
                    found.append(((*stages, stage), tuple(sorted(groups.items()))))
            if len(found) > ORDERS_MAX:
                raise TooManyPlansError
        last = longer
    return found


def _fit_together(groups: dict[tuple[int, int], int], lots: Sequence[Lot]) -> bool:
    by_lot: dict[int, dict[int, int]] = {}
    for (lot, tp), count in groups.items():
        by_lot.setdefault(lot, {})[tp] = count
    return lots_hold(lots, by_lot)


def _gpus(groups: _Groups) -> int:
    return sum(tp * count for (_, tp), count in groups)


@dataclass(slots=True, eq=False)
class _Work:
    """Work done so far; raises an error beyond the limit."""

    done: int = 0

    def add(self, work: int) -> None:
        """Count work."""
        self.done += work
        if self.done > WORK_MAX:
            raise TooManyPlansError


@dataclass(slots=True, eq=False)
class _Enumerator:
    """Enumerates the plans of one micro batch size and number of pipelines."""

    tables: StageTimeTables
    limits: Limits
    orders: Sequence[tuple[tuple[TemplateStage, ...], _Groups]]
    micro_batch: int
    total: int
    pipelines: int
    known: float | None
    work: _Work

    def bounded_mixes(self) -> Iterator[BoundedMix]:
        """The plans that may be as good as the known one."""
        lines = self._lines()
        for kinds in self._kinds(sorted(lines)):
            within_s = self._seconds_max(kinds)
            some = {groups: self._find_within(lines[groups], within_s) for groups in set(kinds)}
            for chosen in self._sets([some[groups] for groups in kinds]):
                caps = [cap for _, _, cap in chosen]
                for counts in self._counts(caps, [index for _, index, _ in chosen], kinds):
                    self.work.add(1)
                    rows = tuple(line for line, _, _ in chosen)
                    seconds = max(line.least_s[n - 1] for line, n in zip(rows, counts, strict=True))
                    yield BoundedMix(self._worth(seconds, kinds), self.micro_batch, rows, counts)

    # -- score ----------------------------------------------------------------------------------

    def _usd_per_s(self, kinds: Sequence[_Groups]) -> float:
        lots = self.tables.lots
        return sum(
            (lots[lot].price_usd_per_gpu_hour or 0.0) / 3600 * tp * count
            for groups in kinds
            for (lot, tp), count in groups
        )

    def _worth(self, seconds: float, kinds: Sequence[_Groups]) -> float:
        if self.limits.goal_is_cost:
            seconds *= self._usd_per_s(kinds)
        return seconds * (1 - ROUNDING)

    def _seconds_max(self, kinds: Sequence[_Groups]) -> float:
        """The longest time in which plans on these GPUs can match the known plan."""
        limits, hourly = self.limits, self.limits.objective.max_usd_per_hour
        usd_per_s = self._usd_per_s(kinds)
        if hourly is not None and usd_per_s * 3600 * (1 - ROUNDING) > hourly:
            return 0.0
        longest_s = math.inf if limits.seconds_max is None else limits.seconds_max
        usd_max = math.inf if limits.usd_max is None else limits.usd_max
        if self.known is not None and limits.goal_is_cost:
            usd_max = min(usd_max, self.known)
        elif self.known is not None:
            longest_s = min(longest_s, self.known)
        if usd_per_s > 0:
            longest_s = min(longest_s, usd_max / usd_per_s)
        return longest_s * (1 + ROUNDING)

    # -- lines ----------------------------------------------------------------------------------

    def _lines(self) -> dict[_Groups, list[BoundedPipeline]]:
        """By their GPUs, the pipelines that may be part of a plan as good as the known one."""
        layers = self.tables.costs.layer_count
        found: dict[_Groups, list[BoundedPipeline]] = {}
        for stages, groups in self.orders:
            within_s = self._seconds_max([groups])
            inner = math.comb(layers - 1, len(stages) - 1)
            entries = inner * self.total * len(stages)
            if entries > ENTRIES_MAX:
                raise TooManyPlansError
            self.work.add(ORDER_WORK * len(stages) + entries // 500)
            cuts = np.array(
                [(0, *c, layers) for c in itertools.combinations(range(1, layers), len(stages) - 1)]
            )
            least_s = self._least_s(stages, cuts)
            for row in np.flatnonzero(least_s[:, 0] <= within_s).tolist():
                line = BoundedPipeline(stages, tuple(cuts[row].tolist()), least_s[row].tolist())
                found.setdefault(groups, []).append(line)
        if sum(map(len, found.values())) * self.total > ENTRIES_MAX:
            raise TooManyPlansError
        return found

    def _least_s(self, stages: tuple[TemplateStage, ...], cuts: Ints) -> Floats:
        """Least seconds by [pipeline, micro batches]."""
        tables, b = self.tables, self.micro_batch
        least = np.zeros((len(cuts), self.total))
        for s, stage in enumerate(stages):
            choice = tables.index_of(tables.lots[stage.lot].gpu, stage.tp)
            seconds = tables.stage_s(
                b,
                self.total,
                self.pipelines,
                behind=len(stages) - 1 - s,
                where=(choice, cuts[:, s], cuts[:, s + 1]),
            )
            np.maximum(least, seconds, out=least)
        return least

    # -- sets -----------------------------------------------------------------------------------

    def _kinds(self, known: Sequence[_Groups]) -> Iterator[tuple[_Groups, ...]]:
        """All ways to give the pipelines GPUs that fit side by side."""
        lots = self.tables.lots

        def walk(start: int, chosen: tuple[_Groups, ...]) -> Iterator[tuple[_Groups, ...]]:
            if len(chosen) == self.pipelines:
                yield chosen
                return
            for index in range(start, len(known)):
                taken: Counter[tuple[int, int]] = Counter()
                for groups in (*chosen, known[index]):
                    taken.update(dict(groups))
                if _fit_together(taken, lots):
                    yield from walk(index, (*chosen, known[index]))

        return walk(0, ())

    def _find_within(
        self, lines: Sequence[BoundedPipeline], seconds: float
    ) -> list[tuple[BoundedPipeline, int, int]]:
        """Pipelines with their index and the most micro batches that they run within a time."""
        found = [(x, n, bisect_right(x.least_s, seconds)) for n, x in enumerate(lines)]
        return sorted((one for one in found if one[2]), key=lambda one: (-one[2], one[1]))

    def _sets(
        self, some: Sequence[Sequence[tuple[BoundedPipeline, int, int]]]
    ) -> Iterator[tuple[tuple[BoundedPipeline, int, int], ...]]:
        """One choice for each pipeline, such that they can run all micro batches together."""
        best = [lines[0][2] if lines else 0 for lines in some]
        if min(best, default=0) == 0:
            return

        def walk(
            chosen: tuple[tuple[BoundedPipeline, int, int], ...], start: int, done: int
        ) -> Iterator[tuple[tuple[BoundedPipeline, int, int], ...]]:
            place = len(chosen)
            if place == len(some):
                yield chosen
                return
            rest = sum(best[place + 1 :])
            for index in range(start, len(some[place])):
                one = some[place][index]
                self.work.add(1)
                if done + one[2] + rest < self.total:
                    return
                # Equal GPUs: the same set in another order is the same plan.
                same = place + 1 < len(some) and some[place + 1] is some[place]
                yield from walk((*chosen, one), index if same else 0, done + one[2])

        yield from walk((), 0, 0)

    def _counts(
        self, caps: Sequence[int], indices: Sequence[int], kinds: Sequence[_Groups]
    ) -> Iterator[tuple[int, ...]]:
        """All ways to share out micro batches; equal pipelines get them in falling order."""
        last = len(caps) - 1

        def walk(counts: tuple[int, ...], left: int) -> Iterator[tuple[int, ...]]:
            place = len(counts)
            most = min(caps[place], left - (last - place))
            if place and (indices[place], kinds[place]) == (indices[place - 1], kinds[place - 1]):
                most = min(most, counts[-1])
            if place == last:
                if left <= most:
                    yield (*counts, left)
                return
            least = max(1, left - sum(caps[place + 1 :]))
            for n in range(most, least - 1, -1):
                yield from walk((*counts, n), left - n)

        return walk((), self.total)
