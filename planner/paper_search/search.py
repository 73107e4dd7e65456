"""The search under the paper's formula: the best chains, improved, and a bound of all plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.paper_search.bound import lower_bounds
from planner.paper_search.chain_search import best_chains
from planner.paper_search.exhaustive import ExhaustiveSearch
from planner.paper_search.family_bounds import (
    Family,
    bounds_of,
    cost_bounds_of,
    option_arrays,
    price_directions,
    rings_of,
)
from planner.paper_search.formula_tables import FormulaEstimate, LinkNumbers, PaperModel
from planner.paper_search.layouts import LotGroups, selections
from planner.paper_search.shape_improver import JudgedShape, ShapeImprover
from planner.pipelines.plan_shape import PlanShape
from planner.problem.bounds import Bounds
from planner.problem.inventory import LotQuota, spot_share
from planner.problem.objective import LimitedFigures, Limits, ObjectiveArrays
from simulator.arrays import Floats
from simulator.spec.plan import equal_cuts

BUDGET_USUAL = 2000
"""The budget for which the other numbers are chosen; they scale with the budget."""
CHAINS = 6
"""Chains that become plans."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """A plan to improve, and the lot groups within which its pipelines stay."""

    found: JudgedShape
    lot_groups: LotGroups


@dataclass(frozen=True, slots=True, eq=False)
class PaperResult:
    """The best shape found, and lower bounds of all plans."""

    best: JudgedShape | None
    bounds: Bounds
    evaluations: int
    found: tuple[JudgedShape, ...]


@dataclass(slots=True, eq=False)
class PaperSearch:
    """One search for one question."""

    model: PaperModel
    limits: Limits
    grants: tuple[LotQuota, ...]
    micro_batches: tuple[int, ...]
    degrees: tuple[int, ...]
    budget: int
    is_uniform: bool = False
    """Whether boundaries divide the layers evenly, with the rest on the last stages."""
    improver: ShapeImprover = field(init=False)

    def __post_init__(self) -> None:
        self.improver = ShapeImprover(
            self.model,
            self.degrees,
            self.score,
            by_price=self.limits.goal_is_cost,
            counts_money=self.limits.needs_prices,
            budget=self.budget,
        )

    def score(self, verdict: FormulaEstimate, shape: PlanShape) -> tuple[float, ...] | None:
        """The score of a shape; ``None`` if it breaks a quota or a limit."""
        used = self.used(shape)
        for grant in self.grants:
            if sum(used.get(lot, 0) for lot in grant.lots) > grant.gpus_max:
                return None
        found = self.limits.score(self.figures(verdict, used))
        return None if found is None else (*found, shape.micro_batch, shape.stages)

    def figures(self, verdict: FormulaEstimate, used: Mapping[int, int]) -> LimitedFigures:
        """The figures that limits apply to."""
        return LimitedFigures(verdict.seconds, verdict.usd, spot_share(used, self.model.lots))

    @staticmethod
    def used(shape: PlanShape) -> dict[int, int]:
        """GPUs by lot."""
        used: dict[int, int] = {}
        for column in shape.columns:
            for lot, tp, count in column:
                used[lot] = used.get(lot, 0) + tp * count
        return used

    # -- the steps ------------------------------------------------------------------------------

    def run(self) -> PaperResult:
        """The best plan found within the budget, and bounds of all plans."""
        families = self.hopeful_families()
        found = self.search_uniform(families) if self.is_uniform else self.search()
        walk = ExhaustiveSearch(self.model, self.improver, self.degrees, is_uniform=self.is_uniform)
        is_complete = walk.run(families)
        best = self.improver.best
        return PaperResult(
            best, self.bound(families, best, is_complete), self.improver.evaluations, found
        )

    def search(self) -> tuple[JudgedShape, ...]:
        """Improve the best chains; the chains as they were before (the improver has the best)."""
        starts = self.chained()
        for start in starts:
            replicas = self.replica_counts(start.found.shape.micro_batch)
            self.improver.mix(start.found, start.lot_groups, replicas)
        return tuple(start.found for start in starts)

    def chained(self) -> list[Start]:
        """Plans whose stages each run on one GPU kind at one TP degree."""
        candidates = best_chains(
            self.model,
            ObjectiveArrays(self.limits),
            micro_batches=self.micro_batches,
            degrees=self.degrees,
            replica_counts=self.replica_counts,
            effort=self.effort,
        )
        starts: list[Start] = []
        for candidate in candidates:
            if len(starts) == self.effort(CHAINS) or self.improver.is_spent:
                break
            shape = candidate.shape()
            found = None if shape is None else self.improver.judge(shape)
            if found is not None:
                lot_groups = tuple(
                    tuple(lot for lots in lot_group for lot in lots)
                    for lot_group in candidate.terms.layout.lot_groups
                )
                starts.append(Start(self.improver.slide(found), lot_groups))
        return sorted(starts, key=lambda start: start.found.score)

    def search_uniform(self, families: Sequence[Family]) -> tuple[JudgedShape, ...]:
        """The best plan of each family, with boundaries given by its number of stages."""
        order = sorted(
            (float(family.score[row, column]), family.arrays.micro_batch, int(replicas), column + 1)
            for family in families
            for row, replicas in enumerate(family.replicas)
            for column in range(family.score.shape[1])
            if math.isfinite(family.score[row, column])
        )
        found: list[JudgedShape] = []
        every = list(selections(self.model))
        kinds = [
            len({self.model.lots[k].gpu for lot_group in one for k in lot_group}) for one in every
        ]
        # One kind is searched quickly, and its bound rules out most mixes of kinds.
        for count in sorted(set(kinds)):
            some = [one for one, of in zip(every, kinds, strict=True) if of == count]
            for bound, micro_batch, replicas, stages in order:
                known = self.improver.best
                if self.improver.is_spent or (known is not None and bound > known.score[0]):
                    break
                found += self._uniform(some, micro_batch, replicas, stages)
            if self.improver.best is not None:
                self.improver.slide(self.improver.best)
        return tuple(sorted(found, key=lambda f: f.score))

    def _uniform(
        self, some: Sequence[LotGroups], micro_batch: int, replicas: int, stages: int
    ) -> Iterator[JudgedShape]:
        """The best plan of a family on each selection of lots."""
        known = self.improver.best
        at_most = math.inf
        if known is not None and not self.limits.needs_prices:
            at_most = known.verdict.seconds
        for lot_groups in some:
            one = self.improver.best_of_cuts(
                lot_groups,
                micro_batch=micro_batch,
                cuts=equal_cuts(self.model.layers, stages),
                replicas=replicas,
                synced={},
                at_most=at_most,
            )
            if one is not None:
                yield one

    def effort(self, usual: int) -> int:
        """Scale a number with the budget."""
        return max(1, usual * self.budget // BUDGET_USUAL)

    def replica_counts(self, micro_batch: int) -> list[int]:
        """For each number of micro batches per pipeline, the fewest pipelines that suffice."""
        total = self.model.global_batch // micro_batch
        gpus = sum(lot.gpus for lot in self.model.lots)
        return [
            count
            for count in sorted({-(-total // most) for most in range(1, total + 1)})
            if count <= gpus
        ]

    def hopeful_families(self) -> list[Family]:
        """All families on the best links, so that their bounds hold for every plan."""
        links: dict[LinkNumbers, Floats] = {}
        # The smallest micro batches need the most replicas, so later sizes find their links cached.
        families = [self._family(b, links) for b in sorted(self.micro_batches)]
        return [family for family in families if family is not None]

    def _family(self, micro_batch: int, links: dict[LinkNumbers, Floats]) -> Family | None:
        """All families of one micro batch size."""
        arrays = option_arrays(self.model, micro_batch, degrees=self.degrees)
        if arrays is None:
            return None
        counts = [c for c in self.replica_counts(micro_batch) if c <= arrays.gpus.sum()]
        total = self.model.global_batch // micro_batch
        rings = rings_of(self.model, counts, most=min(total, int(arrays.gpus.sum())), known=links)
        replicas = np.array(counts, dtype=float)
        stages = np.arange(1.0, min(self.model.layers, int(arrays.gpus.sum())) + 1)
        bounds = bounds_of(
            arrays,
            micro_batches=np.ceil(total / replicas),
            replicas=replicas,
            stages=stages,
            gradient_bytes=self.model.gradient_bytes(),
            rings=rings,
            directions=price_directions(len(arrays.kinds)),
        )
        bounds[replicas[:, None] * stages[None] > arrays.gpus.sum()] = np.inf
        if self.limits.seconds_max is not None:
            bounds[bounds > self.limits.seconds_max] = np.inf
        score = bounds
        if self.limits.goal_is_cost:
            usd = cost_bounds_of(
                arrays,
                global_batch=self.model.global_batch,
                replicas=replicas,
                stages=stages,
                gradient_bytes=float(self.model.gradient_bytes()[-1]),
                rings=rings,
            )
            score = np.where(np.isfinite(bounds), usd, np.inf)
        return Family(arrays, rings, replicas, bounds, score)

    def bound(self, families: list[Family], best: JudgedShape | None, is_complete: bool) -> Bounds:
        """Lower bounds of all plans."""
        seconds = math.inf if best is None else best.verdict.seconds
        objective = math.inf if best is None else best.score[0]
        if is_complete and not self.limits.goal_is_cost:
            return Bounds(seconds, objective)
        bounds = lower_bounds(
            self.model, families, self.limits, seconds=seconds, objective=objective
        )
        return Bounds(bounds.seconds, objective) if is_complete else bounds
