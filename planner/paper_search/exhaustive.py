"""All plans of a small case under the paper's formula, so that the answer is proven best.

Families come in the order of their bounds; the walk ends when no better plan can follow. In a
family, pipelines are multisets of rows (the GPUs of each stage). Their order affects only the rings
of gradient synchronisation, so orders are tried last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from planner.paper_search.family_bounds import Family
from planner.paper_search.formula_tables import PaperModel
from planner.paper_search.shape_improver import ShapeImprover
from planner.pipelines.plan_shape import PlanShape, Run
from planner.problem.bounds import TooManyPlansError
from simulator.estimate.paper_formula import overhead_bytes
from simulator.spec.plan import equal_cuts

GPUS_MAX = 10
"""With more GPUs, even the smallest families have too many plans."""
NODES_MAX = 1_000_000
CUTS_COUNT = 10
"""Search-node cost of a choice of boundaries."""
JUDGED_COUNT = 40
"""Search-node cost of a judged plan."""
ORDERS_MAX = 720

LotOption = tuple[int, int]
"""(lot, TP degree)."""


class ExhaustiveSearch:
    """Walks through all plans that may be better than the best known one."""

    def __init__(
        self,
        model: PaperModel,
        improver: ShapeImprover,
        degrees: Sequence[int],
        *,
        is_uniform: bool = False,
    ) -> None:
        self.model, self.improver, self.degrees = model, improver, degrees
        self.is_uniform = is_uniform
        self.nodes = 0

    def run(self, families: Sequence[Family]) -> bool:
        """Judge all plans of these families; false if there are too many."""
        if sum(lot.gpus for lot in self.model.lots) > GPUS_MAX:
            return False
        order = [
            (float(family.score[row, column]), family.arrays.micro_batch, replicas, column + 1)
            for family in families
            for row, (least, beyond) in enumerate(self._ranges(family))
            for column in range(family.score.shape[1])
            if np.isfinite(family.score[row, column])
            for replicas in range(least, beyond)
        ]
        try:
            for bound, micro_batch, replicas, stages in sorted(order):
                if self.improver.best is not None and bound > self.improver.best.score[0] * (
                    1 + 1e-9
                ):
                    break
                self._family(micro_batch, replicas, stages)
        except TooManyPlansError:
            return False
        return True

    def _count(self, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > NODES_MAX:
            raise TooManyPlansError

    def _ranges(self, family: Family) -> Iterator[tuple[int, int]]:
        """Ranges of replica counts that share a bound."""
        most = self.model.global_batch // family.arrays.micro_batch
        counts = [int(n) for n in family.replicas]
        return itertools.pairwise([*counts, min(most, int(family.arrays.gpus.sum())) + 1])

    def _family(self, micro_batch: int, replicas: int, stages: int) -> None:
        inner = range(1, self.model.layers)
        for chosen in itertools.combinations(inner, stages - 1):
            cuts = (0, *chosen, self.model.layers)
            if self.is_uniform and not _is_uniform(cuts):
                continue
            self._count(CUTS_COUNT)
            options = [self._options(micro_batch, cuts, s) for s in range(stages)]
            if not all(options):
                continue
            self._count(math.prod(map(len, options)))
            rows = list(itertools.product(*options))
            for pick in self._multisets(rows, replicas):
                self._orders(micro_batch, cuts, [rows[i] for i in pick])

    def _options(self, micro_batch: int, cuts: tuple[int, ...], s: int) -> list[LotOption]:
        """The (lot, TP) pairs that can run a stage within memory."""
        model = self.model
        found = []
        for lot, tp in itertools.product(range(len(model.lots)), self.degrees):
            if not model.lots[lot].room(tp) or not model.measured(lot, tp, micro_batch):
                continue
            held = model.memory(tp, micro_batch, len(cuts) - 1 - s)
            needed = held[cuts[s + 1]] - held[cuts[s]] + overhead_bytes(tp)
            if needed <= model.capacity_bytes[lot]:
                found.append((lot, tp))
        return found

    def _multisets(self, rows: list[tuple[LotOption, ...]], replicas: int) -> Iterator[list[int]]:
        """Choices of rows that fit the lots together."""
        lots = self.model.lots
        taken: list[dict[int, int]] = [{} for _ in lots]
        pick: list[int] = []

        def walk(start: int) -> Iterator[list[int]]:
            if len(pick) == replicas:
                yield pick
                return
            for index in range(start, len(rows)):
                self._count(1)
                for lot, tp in rows[index]:
                    taken[lot][tp] = taken[lot].get(tp, 0) + 1
                if all(lots[lot].holds(taken[lot]) for lot, _ in rows[index]):
                    pick.append(index)
                    yield from walk(index)
                    pick.pop()
                for lot, tp in rows[index]:
                    taken[lot][tp] -= 1

        return walk(0)

    def _orders(
        self, micro_batch: int, cuts: tuple[int, ...], rows: list[tuple[LotOption, ...]]
    ) -> None:
        """Judge all orders of the pipelines that differ in their rings."""
        orders: Sequence[tuple[tuple[LotOption, ...], ...]] = [tuple(rows)]
        zones = {tuple(lot for lot, _ in row) for row in rows}
        if len(zones) > 1:
            orders = sorted(set(itertools.islice(itertools.permutations(rows), ORDERS_MAX)))
        self._count(JUDGED_COUNT * len(orders))
        for order in orders:
            columns = tuple(runs_of([row[s] for row in order]) for s in range(len(cuts) - 1))
            self.improver.judge(PlanShape(micro_batch, cuts, columns))


def _is_uniform(cuts: tuple[int, ...]) -> bool:
    """Whether this is the published split of the layers."""
    return cuts == equal_cuts(cuts[-1], len(cuts) - 1)


def runs_of(column: Sequence[LotOption]) -> tuple[Run, ...]:
    """A list of replicas as runs of equal ones."""
    return tuple((lot, tp, len(list(same))) for (lot, tp), same in itertools.groupby(column))
