"""Improves a good plan: moves boundaries, and deals replicas to GPU kinds as they fit."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.paper_search.formula_tables import FormulaEstimate, PaperModel, micro_batch_counts
from planner.paper_search.layouts import LotGroups
from planner.paper_search.mixing import Mixer
from planner.pipelines.plan_shape import PlanShape
from simulator.estimate.paper_formula import MOST_TP_SHARING_GRADIENTS


@dataclass(frozen=True, slots=True)
class JudgedShape:
    """A shape with its score; lower is better."""

    score: tuple[float, ...]
    shape: PlanShape
    verdict: FormulaEstimate


@dataclass(slots=True, eq=False)
class ShapeImprover:
    """Judges shapes, counts evaluations, and keeps the best."""

    model: PaperModel
    degrees: tuple[int, ...]
    score: Callable[[FormulaEstimate, PlanShape], tuple[float, ...] | None]
    by_price: bool
    counts_money: bool
    evaluations: int = 0
    best: JudgedShape | None = None
    budget: int = 10**9
    _mixers: dict[object, Mixer] = field(default_factory=dict)
    _judged: dict[PlanShape, JudgedShape | None] = field(default_factory=dict)

    @property
    def is_spent(self) -> bool:
        """Whether the budget is used up."""
        return self.evaluations >= self.budget

    def judge(self, shape: PlanShape) -> JudgedShape | None:
        """The shape with its score; ``None`` if it breaks a limit."""
        if shape in self._judged:
            return self._judged[shape]
        self.evaluations += 1
        verdict = self.model.judge(shape)
        score = None
        if math.isfinite(verdict.seconds) and self.model.fits(shape):
            score = self.score(verdict, shape)
        found = None if score is None else JudgedShape(score, shape, verdict)
        self._judged[shape] = found
        if found is not None and (self.best is None or found.score < self.best.score):
            self.best = found
        return found

    def mixer(self, lot_groups: LotGroups, micro_batch: int, cuts: tuple[int, ...]) -> Mixer:
        key = (lot_groups, micro_batch, cuts)
        if key not in self._mixers:
            self._mixers[key] = Mixer(
                self.model,
                lot_groups,
                micro_batch=micro_batch,
                cuts=cuts,
                degrees=self.degrees,
                by_price=self.by_price,
            )
        return self._mixers[key]

    def best_of_cuts(
        self,
        lot_groups: LotGroups,
        *,
        micro_batch: int,
        cuts: tuple[int, ...],
        replicas: int,
        synced: Mapping[str, float],
        at_most: float = math.inf,
    ) -> JudgedShape | None:
        """Find the least time limit under which replicas can be dealt, then use its slack."""
        mixer = self.mixer(lot_groups, micro_batch, cuts)
        most, _ = micro_batch_counts(self.model.global_batch // micro_batch, replicas)
        levels = [level for level in mixer.levels() if most * level <= at_most]
        stages = len(cuts) - 1
        if not levels or mixer.deal(replicas, [levels[-1]] * stages, synced) is None:
            return None
        low, high = 0, len(levels)
        shape = None
        while low < high:
            middle = (low + high) // 2
            dealt = mixer.deal(replicas, [levels[middle]] * stages, synced)
            if dealt is None:
                low = middle + 1
            else:
                high, shape = middle, dealt
        if shape is None:
            return None
        found = self.judge(shape)
        if self.counts_money:
            # Where dollars count, a longer time may be cheaper.
            for index in range(high + 1, len(levels)):
                dealt = mixer.deal(replicas, [levels[index]] * stages, synced)
                one = None if dealt is None else self.judge(dealt)
                if one is not None and (found is None or one.score < found.score):
                    found, high = one, index
        limits = [levels[high]] * stages
        # Speed up stages with spare GPUs, slowest first.
        for s in range(stages):
            options = sorted(
                {c.level_s for kind in mixer.choices[s] for c in kind if c.level_s < limits[s]}
            )
            for level in options:
                tried = [*limits[:s], level, *limits[s + 1 :]]
                dealt = mixer.deal(replicas, tried, synced)
                if dealt is None:
                    continue
                better = self.judge(dealt)
                if better is not None and (found is None or better.score < found.score):
                    found, limits = better, tried
                break
        return found

    def slide(self, found: JudgedShape) -> JudgedShape:
        """Move boundaries and reorder lot groups while that helps; the GPUs of the stages stay."""
        best, improved = found, True
        while improved and not self.is_spent:
            improved = False
            for shape in _slide_once(best.shape):
                tried = self.judge(shape)
                if tried is not None and tried.score < best.score:
                    best, improved = tried, True
        return best

    def mix(
        self, found: JudgedShape, lot_groups: LotGroups, replicas: Sequence[int]
    ) -> JudgedShape:
        """Try other numbers of pipelines, dealing their replicas to GPU kinds as they fit."""
        best, improved = found, True
        while improved and not self.is_spent:
            improved = False
            index = bisect.bisect_left(replicas, best.shape.replicas)
            synced = self.synced_bytes(best.shape)
            for count in replicas[max(0, index - 1) : index + 3]:
                for limits in (synced, {}):
                    tried = self.best_of_cuts(
                        lot_groups,
                        micro_batch=best.shape.micro_batch,
                        cuts=best.shape.cuts,
                        replicas=count,
                        synced=limits,
                        at_most=math.inf if self.counts_money else best.verdict.seconds,
                    )
                    if tried is not None and tried.score < best.score:
                        best, improved = self.slide(tried), True
        return best

    def synced_bytes(self, shape: PlanShape) -> dict[str, float]:
        """The most bytes that a group of each kind synchronises; unused kinds get the maximum."""
        row = self.model.gradient_bytes()
        most: dict[str, float] = {}
        for s, column in enumerate(shape.columns):
            whole = float(row[shape.cuts[s + 1]] - row[shape.cuts[s]])
            for lot, tp, _ in column:
                kind = self.model.lots[lot].gpu
                synced = whole / min(tp, MOST_TP_SHARING_GRADIENTS)
                most[kind] = max(most.get(kind, 0.0), synced)
        return {lot.gpu: most.get(lot.gpu, max(most.values())) for lot in self.model.lots}


def _slide_once(shape: PlanShape) -> Iterator[PlanShape]:
    """The same columns with boundaries moved, or with pipelines in another order."""
    for cuts in _move_boundaries(shape.cuts):
        yield replace(shape, cuts=cuts)
    counts = [count for _, _, count in shape.columns[0]]
    if all([count for _, _, count in column] == counts for column in shape.columns):
        for a, b in itertools.combinations(range(len(counts)), 2):
            order = list(range(len(counts)))
            order[a], order[b] = b, a
            yield replace(
                shape, columns=tuple(tuple(column[n] for n in order) for column in shape.columns)
            )


def _move_boundaries(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Boundaries with one, or several adjacent ones, moved by a layer."""
    last = len(cuts) - 1
    for a in range(1, last):
        for b in range(a, last):
            for step in (-1, 1):
                moved = tuple(
                    cut + step if a <= index <= b else cut for index, cut in enumerate(cuts)
                )
                if moved[a - 1] < moved[a] and moved[b] < moved[b + 1]:
                    yield moved
