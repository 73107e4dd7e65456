"""Deals the replicas of stages with fixed boundaries to GPU kinds.

Under a limit on a stage's seconds and synchronised bytes, each GPU kind needs some least TP degree.
The rest is a transport problem: every stage needs its replicas, a replica takes that many GPUs of
one kind, and each kind has a supply. It is solved by exchanges: replicas move from a kind
that is short of GPUs to the kind where they cost least. It may fail although a solution exists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.paper_search.formula_tables import PaperModel
from planner.paper_search.layouts import LotGroups, Lots, dealt_runs
from planner.pipelines.plan_shape import PlanShape, Run
from simulator.estimate.paper_formula import MOST_TP_SHARING_GRADIENTS, overhead_bytes, sent_s


@dataclass(frozen=True, slots=True)
class TpChoice:
    """A GPU kind at a TP degree on one stage."""

    tp: int
    level_s: float
    synced_bytes: float


class Mixer:
    """Deals replicas for one micro batch size and one set of boundaries."""

    def __init__(
        self,
        model: PaperModel,
        lot_groups: LotGroups,
        *,
        micro_batch: int,
        cuts: tuple[int, ...],
        degrees: Sequence[int],
        by_price: bool = False,
    ) -> None:
        self.model, self.lot_groups = model, lot_groups
        self.micro_batch, self.cuts = micro_batch, cuts
        self.by_price = by_price
        lots = sorted({lot for lot_group in lot_groups for lot in lot_group})
        self.kinds = sorted({model.lots[lot].gpu for lot in lots})
        self.stages = len(cuts) - 1
        self._degrees = {
            kind: [
                tp
                for tp in model.profile.degrees(kind)
                if tp in degrees
                and (kind, tp, micro_batch) in model.profile.timings
                and tp in model.profile.sizes
                and any(model.lots[lot].gpu == kind and model.lots[lot].room(tp) for lot in lots)
            ]
            for kind in self.kinds
        }
        self._lot_of = {
            kind: next(lot for lot in lots if model.lots[lot].gpu == kind) for kind in self.kinds
        }
        # Neighbouring limits often have equal solutions.
        self._dealt: dict[tuple[int, tuple[tuple[int, ...], ...]], PlanShape | None] = {}
        self.choices = [[self._choices(s, kind) for kind in self.kinds] for s in range(self.stages)]

    def _choices(self, s: int, kind: str) -> list[TpChoice]:
        model, b = self.model, self.micro_batch
        first, end = self.cuts[s], self.cuts[s + 1]
        lot = self._lot_of[kind]
        whole = float(model.gradient_bytes()[end] - model.gradient_bytes()[first])
        found = []
        for tp in self._degrees[kind]:
            memory = model.memory(tp, b, self.stages - s)
            held = float(memory[end] - memory[first]) + overhead_bytes(tp)
            if held > model.capacity_bytes[lot] or not model.allows(self.cuts, s, kind, tp, b):
                continue
            row, ends = model.seconds(kind, tp, b), (lot, tp, lot, tp)
            ahead = back = 0.0
            if s + 1 < self.stages:
                ahead = model.send_s(*ends, model.output_bytes(end, b))
            if s > 0:
                back = model.send_s(*ends, model.output_bytes(first, b))
            level = float(row[end] - row[first]) + sent_s(s, self.stages, ahead, back)
            found.append(TpChoice(tp, level, whole / min(tp, MOST_TP_SHARING_GRADIENTS)))
        return found

    def levels(self) -> list[float]:
        """Sorted breakpoints of the level limit."""
        return sorted({c.level_s for row in self.choices for kind in row for c in kind})

    def deal(
        self, replicas: int, limits: Sequence[float], synced: Mapping[str, float]
    ) -> PlanShape | None:
        """Deal the replicas under a time limit per stage and a limit of synchronised bytes per
        kind.
        """
        most_bytes = [synced.get(kind, math.inf) * (1 + 1e-9) for kind in self.kinds]
        needs = []
        for row, limit in zip(self.choices, limits, strict=True):
            need = [
                next(
                    (
                        c.tp
                        for c in kind
                        if c.level_s <= limit * (1 + 1e-12) and c.synced_bytes <= most
                    ),
                    0,
                )
                for kind, most in zip(row, most_bytes, strict=True)
            ]
            if not any(need):
                return None
            needs.append(need)
        key = (replicas, tuple(map(tuple, needs)))
        if key not in self._dealt:
            self._dealt[key] = self._spread_pipelines(replicas, needs)
        return self._dealt[key]

    def _spread_pipelines(self, replicas: int, needs: list[list[int]]) -> PlanShape | None:
        """Give each lot group as many pipelines as it can run, in the order of the lot groups."""
        columns: list[list[Run]] = [[] for _ in range(self.stages)]
        left = replicas
        for lot_group in self.lot_groups:
            supply = [
                sum(self.model.lots[k].gpus for k in lot_group if self.model.lots[k].gpu == kind)
                for kind in self.kinds
            ]
            count = left
            runs = self._place(lot_group, count, needs, supply)
            if runs is None and len(self.lot_groups) > 1:
                low, high = 0, count - 1
                while low < high:
                    middle = (low + high + 1) // 2
                    if self._place(lot_group, middle, needs, supply) is None:
                        high = middle - 1
                    else:
                        low = middle
                count = low
                runs = self._place(lot_group, count, needs, supply) if count else None
            if runs is None:
                continue
            for column, more in zip(columns, runs, strict=True):
                column.extend(more)
            left -= count
            if left == 0:
                break
        if left:
            return None
        return PlanShape(self.micro_batch, self.cuts, tuple(map(tuple, columns)))

    def _place(
        self, lot_group: Lots, count: int, needs: list[list[int]], supply: list[int]
    ) -> list[list[Run]] | None:
        if count == 0:
            return [[] for _ in needs]
        prices = None
        if self.by_price:
            prices = [
                self.model.lots[self._lot_of[kind]].price_usd_per_gpu_hour or 0.0
                for kind in self.kinds
            ]
        counts = transport(count, needs, supply, prices)
        return None if counts is None else self._give_to_lots(lot_group, needs, counts)

    def _give_to_lots(
        self, lot_group: Lots, needs: list[list[int]], counts: list[list[int]]
    ) -> list[list[Run]] | None:
        """Give groups to lots, large groups first, whole stages together where possible."""
        lots = self.model.lots
        by_kind = [[lot for lot in lot_group if lots[lot].gpu == kind] for kind in self.kinds]
        order = sorted(
            (-needs[s][k], s, k) for s, row in enumerate(counts) for k, n in enumerate(row) if n
        )
        wanted = ((s, needs[s][k], counts[s][k], by_kind[k]) for _, s, k in order)
        runs = dealt_runs(lots, wanted, self.stages)
        # Sort, so that equal stages have equal replicas in the same pipelines.
        return None if runs is None else [sorted(column) for column in runs]


def transport(
    replicas: int,
    needs: Sequence[Sequence[int]],
    supply: Sequence[int],
    prices: Sequence[float] | None = None,
) -> list[list[int]] | None:
    """Replicas by [stage][kind] within the supply; ``None`` if the heuristic finds none.

    ``needs`` has 0 where a kind cannot run a stage.
    """
    kinds = range(len(supply))
    weight = [
        (prices[k] if prices is not None else 1.0 / supply[k]) if supply[k] else math.inf
        for k in kinds
    ]
    counts = []
    load = [0] * len(supply)
    for need in needs:
        usable = [k for k in kinds if need[k] and supply[k]]
        if not usable:
            return None
        best = min(usable, key=lambda k: (need[k] * weight[k], k))
        counts.append([replicas if k == best else 0 for k in kinds])
        load[best] += replicas * need[best]
    for _ in range(8 * len(needs) * len(supply)):
        over = [k for k in kinds if load[k] > supply[k]]
        if not over:
            return counts
        source = max(over, key=lambda k: (load[k] / supply[k], k))
        moves = [
            (need[target] * weight[target] / need[source], s, target)
            for s, need in enumerate(needs)
            if counts[s][source]
            for target in kinds
            if target != source and need[target] and load[target] + need[target] <= supply[target]
        ]
        if not moves:
            return None
        _, s, target = min(moves)
        excess = load[source] - supply[source]
        moved = min(
            counts[s][source],
            -(-excess // needs[s][source]),
            (supply[target] - load[target]) // needs[s][target],
        )
        counts[s][source] -= moved
        counts[s][target] += moved
        load[source] -= moved * needs[s][source]
        load[target] += moved * needs[s][target]
    return None
