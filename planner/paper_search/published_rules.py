"""The search space of the planner in the SOSP'25 paper, for our own search.

Layers are divided evenly, a GPU kind has one TP degree per stage, given by a rule, and a stage
stays in one region. The rule: the least degree that fits the memory, or the last that is still 1.5
times as fast as the one before; on a mixed cluster the first kind by name takes the least.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.paper_search.formula_tables import PaperModel
from planner.pipelines.plan_shape import PlanShape
from simulator.estimate.paper_formula import overhead_bytes
from simulator.spec.plan import equal_cuts

SPEEDUP_LEAST = 1.5
"""A higher TP degree must be faster than the previous one by this factor."""


@dataclass(eq=False)
class PublishedModel(PaperModel):
    """The formula's tables, restricted by the published rules."""

    degrees: tuple[int, ...] = ()
    regions: tuple[str, ...] = ()
    """Region of each lot."""
    _rules: dict[object, int | None] = field(default_factory=dict)

    def fits(self, shape: PlanShape) -> bool:
        """Whether it fits in memory and lies in the published planner's space."""
        return (
            shape.cuts == equal_cuts(self.layers, shape.stages)
            and super().fits(shape)
            and all(
                len({self.regions[lot] for lot, _, _ in column}) == 1
                and all(
                    self.allows(shape.cuts, s, self.lots[lot].gpu, tp, shape.micro_batch)
                    for lot, tp, _ in column
                )
                for s, column in enumerate(shape.columns)
            )
        )

    def allows(self, cuts: tuple[int, ...], s: int, gpu: str, tp: int, micro_batch: int, /) -> bool:
        """Whether the rule gives this TP degree."""
        # A kind that cannot hold every stage is not used at all.
        rules = [self._rule(cuts, stage, gpu, micro_batch) for stage in range(len(cuts) - 1)]
        return all(rules) and rules[s] == tp

    def _rule(self, cuts: tuple[int, ...], s: int, gpu: str, micro_batch: int) -> int | None:
        first, end, following = cuts[s], cuts[s + 1], len(cuts) - 1 - s
        key = (first, end, following, gpu, micro_batch)
        if key not in self._rules:
            self._rules[key] = self._by_rule(first, end, following, gpu, micro_batch)
        return self._rules[key]

    def _by_rule(
        self, first: int, end: int, following: int, gpu: str, micro_batch: int
    ) -> int | None:
        capacity = self.capacity_bytes[next(k for k, x in enumerate(self.lots) if x.gpu == gpu)]
        degrees = [
            tp
            for tp in self.degrees
            if (gpu, tp, micro_batch) in self.profile.timings and tp in self.profile.sizes
        ]
        least = None
        for tp in degrees:
            row = self.memory(tp, micro_batch, following)
            if float(row[end] - row[first]) + overhead_bytes(tp) <= capacity:
                least = tp
                break
        kinds = {lot.gpu for lot in self.lots}
        if least is None or (len(kinds) > 1 and gpu == min(kinds)):
            return least
        fastest, before = 0, float("inf")
        for tp in degrees:
            row = self.seconds(gpu, tp, micro_batch)
            now = float(row[end] - row[first])
            if before < SPEEDUP_LEAST * now:
                break
            fastest, before = tp, now
        return max(fastest, least)
