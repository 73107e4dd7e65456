"""The search under the paper estimator: families by bound, boundaries by reach, then polish."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.certificate import Bounds, certify
from planner.exhaust import Exhaustion
from planner.families import (
    Array,
    Family,
    bounds_of,
    cost_bounds_of,
    menu_of,
    price_directions,
    rings_of,
)
from planner.limits import Figures, Limits
from planner.paper_model import PaperModel, Shape, Verdict
from planner.polish import Found, Workbench
from planner.reach import ReachTable, reach_table
from planner.selection import TYPICAL_BYTES, Selection, selections
from planner.supply import Grant

LEVEL_RATIO_FIRST = 1.3
LEVEL_RATIO = 1.05
LEVEL_RATIO_ONE_KIND = 1.07
LEVEL_RATIO_COST = 1.12
"""Neighbouring limits of a stage's time; polishing finds what lies between."""
SYNC_SHARES = (0.05, 0.08, 0.12, 0.18, 0.25, 0.36, 0.5, 1.0)
DRAFTS = 12
"""Families whose drafts are judged."""
DRAFTS_TRIED = 10
DRAFTS_EARLY = 3
BUDGET_USUAL = 2000
"""The budget for which these numbers are meant; others scale them."""
CELLS = 3
POLISHED = 3
TURNED = 1
LINKS_ALIKE = 3.0
"""Links that differ by less are all taken for the best of them while drafting."""
EASED = 1.15
"""Rough estimates may break a limit by so much before the family is given up."""
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A family of a selection at its best limits, by a rough estimate."""

    rough: float
    sure: float
    """The same under limits that are kept for sure; infinite if there are none."""
    selection: Selection
    table: ReachTable
    replicas: int
    stages: int
    cells: tuple[tuple[int, int], ...]
    """Limits (level, bytes) to try, the best first."""


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The best shape found, and what every plan takes at least."""

    best: Found | None
    bounds: Bounds
    evaluations: int
    found: tuple[Found, ...]


@dataclass(slots=True, eq=False)
class PaperSearch:
    """One search; it holds what its steps share."""

    model: PaperModel
    limits: Limits
    grants: tuple[Grant, ...]
    micro_batches: tuple[int, ...]
    degrees: tuple[int, ...]
    budget: int
    is_uniform: bool = False
    """Only boundaries that divide the layers evenly, the rest to the last stages."""
    bench: Workbench = field(init=False)

    def __post_init__(self) -> None:
        self.bench = Workbench(
            self.model,
            self.degrees,
            self.worth,
            by_price=self.limits.goal_is_cost,
            counts_money=self.limits.needs_prices,
            budget=self.budget,
        )

    def worth(self, verdict: Verdict, shape: Shape) -> tuple[float, ...] | None:
        used = self.used(shape)
        for grant in self.grants:
            if sum(used.get(lot, 0) for lot in grant.lots) > grant.gpus_max:
                return None
        found = self.limits.worth(self.figures(verdict, used))
        return None if found is None else (*found, shape.micro_batch, shape.stages)

    def figures(self, verdict: Verdict, used: Mapping[int, int]) -> Figures:
        lots = self.model.lots
        spot = sum(max(0, n - (lots[k].gpus - lots[k].spot_gpus)) for k, n in used.items())
        return Figures(verdict.seconds, verdict.usd, spot / sum(used.values()))

    @staticmethod
    def used(shape: Shape) -> dict[int, int]:
        """GPUs by lot."""
        used: dict[int, int] = {}
        for column in shape.columns:
            for lot, tp, count in column:
                used[lot] = used.get(lot, 0) + tp * count
        return used

    # -- the steps ------------------------------------------------------------------------------

    def run(self) -> Result:
        """The best plan that the budget allows to find, and bounds for all plans."""
        families = self.hopeful_families()
        found = self.search_uniform(families) if self.is_uniform else self.search()
        walk = Exhaustion(self.model, self.bench, self.degrees, is_uniform=self.is_uniform)
        is_complete = walk.run(families)
        best = self.bench.best
        return Result(best, self.bound(families, best, is_complete), self.bench.evaluations, found)

    def search(self) -> tuple[Found, ...]:
        """Plans of the best families, as they were before they were polished; the best one is
        the workbench's."""
        drafts: list[Draft] = []
        best = math.inf
        found: dict[Draft, Found | None] = {}
        for selection in selections(self.model):
            more = sorted(self.drafts(selection, best), key=lambda d: d.rough)
            drafts += more
            # What is found early spares the selections that follow most of their work.
            for draft in more[:DRAFTS_EARLY]:
                found[draft] = self.realise(draft)
            if self.bench.best is not None:
                best = self.bench.best.worth[0]
        drafts.sort(key=lambda d: d.rough)
        self._realise_best(drafts, found)
        pairs = sorted(
            ((one, draft) for draft, one in found.items() if one is not None),
            key=lambda pair: pair[0].worth,
        )
        polished = []
        for one, draft in pairs[: self.effort(POLISHED)]:
            replicas = self.replica_counts(one.shape.micro_batch)
            sites = draft.selection.sites
            polished.append((self.bench.polish(one, sites, replicas), sites, replicas))
        polished.sort(key=lambda each: each[0].worth)
        for one, sites, replicas in polished[: self.effort(TURNED)]:
            self.bench.turned(one, sites, replicas)
        return tuple(one for one, _ in pairs)

    def search_uniform(self, families: Sequence[Family]) -> tuple[Found, ...]:
        """The best plan of each family, whose boundaries are given by its number of stages."""
        order = sorted(
            (float(family.worth[row, column]), family.menu.micro_batch, int(replicas), column + 1)
            for family in families
            for row, replicas in enumerate(family.replicas)
            for column in range(family.worth.shape[1])
            if math.isfinite(family.worth[row, column])
        )
        found = []
        every = list(selections(self.model))
        for bound, micro_batch, replicas, stages in order:
            known = self.bench.best
            if self.bench.is_spent or (known is not None and bound > known.worth[0]):
                break
            at_most = math.inf
            if known is not None and not self.limits.needs_prices:
                at_most = known.verdict.seconds
            for selection in every:
                one = self.bench.best_of_cuts(
                    selection.sites,
                    micro_batch=micro_batch,
                    cuts=uniform_cuts(self.model.layers, stages),
                    replicas=replicas,
                    synced={},
                    at_most=at_most,
                )
                if one is not None:
                    found.append(one)
        return tuple(sorted(found, key=lambda f: f.worth))

    def _realise_best(self, drafts: Sequence[Draft], found: dict[Draft, Found | None]) -> None:
        """Realise the best drafts until enough of them have become plans."""
        wanted = self.effort(DRAFTS)
        plans = 0
        for draft in drafts[: DRAFTS_TRIED * wanted]:
            if plans >= wanted or self.bench.is_spent:
                return
            if draft not in found:
                found[draft] = self.realise(draft)
            plans += found[draft] is not None

    def effort(self, usual: int) -> int:
        """How many of something the budget is good for."""
        return max(1, usual * self.budget // BUDGET_USUAL)

    def replica_counts(self, micro_batch: int) -> list[int]:
        """For each number of micro batches the fewest pipelines that need no more."""
        total = self.model.global_batch // micro_batch
        gpus = sum(lot.gpus for lot in self.model.lots)
        return [
            count
            for count in sorted({-(-total // most) for most in range(1, total + 1)})
            if count <= gpus
        ]

    def has_alike_links(self, selection: Selection) -> bool:
        """Whether the links among a selection's lots are about equally fast."""
        times = [
            self.model.ring_s(one, other, TYPICAL_BYTES, 8)
            for one in selection.lots
            for other in selection.lots
        ]
        return max(times) <= LINKS_ALIKE * min(times)

    def families(
        self, micro_batch: int, sites: Sequence[Sequence[int]], *, hopeful: bool
    ) -> Family | None:
        """All the families of one micro batch size."""
        menu = menu_of(self.model, micro_batch, degrees=self.degrees, sites=sites, hopeful=hopeful)
        if menu is None:
            return None
        counts = [c for c in self.replica_counts(micro_batch) if c <= menu.gpus.sum()]
        lots = sorted({lot for site in sites for lot in site})
        total = self.model.global_batch // micro_batch
        rings = rings_of(
            self.model,
            counts,
            lots=lots,
            hopeful=hopeful,
            most=min(total, int(menu.gpus.sum())),
        )
        replicas = np.array(counts, dtype=float)
        stages = np.arange(1.0, min(self.model.layers, int(menu.gpus.sum())) + 1)
        bounds = bounds_of(
            menu,
            micro_batches=np.ceil(total / replicas),
            replicas=replicas,
            stages=stages,
            gradient_bytes=self.model.gradient_bytes(),
            rings=rings,
            directions=price_directions(len(menu.kinds)),
        )
        bounds[replicas[:, None] * stages[None] > menu.gpus.sum()] = np.inf
        if self.limits.seconds_max is not None:
            bounds[bounds > self.limits.seconds_max] = np.inf
        worth = bounds
        if self.limits.goal_is_cost:
            usd = cost_bounds_of(
                menu,
                global_batch=self.model.global_batch,
                replicas=replicas,
                stages=stages,
                gradient_bytes=float(self.model.gradient_bytes()[-1]),
                rings=rings,
            )
            worth = np.where(np.isfinite(bounds), usd, np.inf)
        return Family(menu, rings, replicas, bounds, worth)

    def hopeful_families(self) -> list[Family]:
        """All families on the best links there are, so that their bounds hold for every plan."""
        sites = [tuple(range(len(self.model.lots)))]
        return [
            family
            for b in self.micro_batches
            if (family := self.families(b, sites, hopeful=True)) is not None
        ]

    def bound(self, families: list[Family], best: Found | None, is_complete: bool) -> Bounds:
        """What every plan takes at least."""
        seconds = math.inf if best is None else best.verdict.seconds
        objective = math.inf if best is None else best.worth[0]
        if is_complete and not self.limits.goal_is_cost:
            return Bounds(seconds, objective)
        bounds = certify(self.model, families, self.limits, seconds=seconds, objective=objective)
        return Bounds(bounds.seconds, objective) if is_complete else bounds

    def drafts(self, selection: Selection, best: float) -> Iterator[Draft]:
        """The families of a selection that may be better than what is known, at their best."""
        sites = [site.lots for site in selection.sites]
        hopeful = self.has_alike_links(selection)
        families = [
            family
            for b in self.micro_batches
            if (family := self.families(b, sites, hopeful=hopeful)) is not None
        ]
        if math.isinf(best):
            # A first idea of what can be had, from a few limits only.
            for family in families:
                rough = self._drafts(selection, family, best, LEVEL_RATIO_FIRST, 1.0)
                best = min([best, *(draft.sure for draft in rough)])
        for family in families:
            ratio = LEVEL_RATIO if len(family.menu.kinds) > 1 else LEVEL_RATIO_ONE_KIND
            if self.limits.goal_is_cost:
                ratio = LEVEL_RATIO_COST
            yield from self._drafts(selection, family, best, ratio, EASED)

    def _drafts(
        self, selection: Selection, family: Family, best: float, ratio: float, eased: float
    ) -> list[Draft]:
        menu, model = family.menu, self.model
        rows, columns = np.nonzero(family.worth < best)
        if not len(rows):
            return []
        most = np.ceil(model.global_batch // menu.micro_batch / family.replicas)[rows]
        stages = columns + 1
        high = float(menu.seconds[:, -1].max() + 2 * menu.send_s[np.isfinite(menu.send_s)].max())
        longest = self.limits.seconds_max if self.limits.goal_is_cost else best
        if longest is not None and math.isfinite(longest):
            high = min(high, float((longest / most).max()))
        low = float(menu.seconds[:, -1].min()) / int(stages.max())
        steps = max(1, math.ceil(math.log(max(high / low, 1.001)) / math.log(ratio)))
        levels = high * ratio ** np.arange(-steps, 1.0)
        sizes = family.rings.limits(SYNC_SHARES)
        weights = menu.tp / menu.gpus[menu.kind]
        prices = price_directions(len(menu.kinds))[:, menu.kind] * weights
        if self.limits.needs_prices:
            prices = np.concatenate([prices, menu.usd_per_s[None, :]])
        table = reach_table(
            model,
            menu,
            levels_s=levels,
            gradient_bytes=sizes,
            prices=prices,
            stages_max=int(stages.max()),
        )
        directions = len(price_directions(len(menu.kinds)))
        need = table.whole[..., :directions].max(axis=-1)
        replicas = family.replicas[rows]
        sync = family.rings.slowest_s(sizes)[rows]
        rough = (most - 1 + stages)[:, None, None] * levels[:, None] + sync[:, None, :]
        possible = need[columns] * replicas[:, None, None] <= 1 + 1e-5
        worth, sure = rough, possible
        if self.limits.needs_prices:
            usd_per_s = table.whole[..., -1][columns] * replicas[:, None, None]
            sure = self._in_money(rough, usd_per_s, possible, 1.0)[1]
            worth, possible = self._in_money(rough, usd_per_s, possible, eased)
        surely = np.where(sure, worth, np.inf).reshape(len(rows), -1).min(axis=1)
        # For each limit of bytes the best limit of time.
        worth = np.where(possible, worth, np.inf)
        level = worth.argmin(axis=1)
        at_level = np.take_along_axis(worth, level[:, None, :], axis=1)[:, 0, :]
        order = at_level.argsort(axis=1, kind="stable")[:, :CELLS]
        return [
            Draft(
                float(at_level[i, order[i, 0]]),
                float(surely[i]),
                selection,
                table,
                int(replicas[i]),
                int(stages[i]),
                tuple(
                    (int(level[i, size]), int(size))
                    for size in order[i]
                    if math.isfinite(at_level[i, size])
                ),
            )
            for i in np.flatnonzero(np.isfinite(at_level.min(axis=1)))
        ]

    def _in_money(
        self, seconds: Array, usd_per_s: Array, possible: Mask, eased: float
    ) -> tuple[Array, Mask]:
        """The rough worth where dollars count, and which limits may be kept (rough is no proof).

        What breaks a limit by a little comes after what keeps it.
        """
        usd = seconds * usd_per_s
        worth = usd if self.limits.goal_is_cost else seconds
        limits = (
            (usd, self.limits.usd_max),
            (usd_per_s * 3600, self.limits.objective.max_usd_per_hour),
            (seconds, self.limits.seconds_max),
        )
        for value, most in limits:
            if most is not None:
                possible = possible & (value <= most * eased)
                worth = worth * np.maximum(1.0, value / max(most, 1e-12)) ** 2
        return worth, possible

    @staticmethod
    def synced(table: ReachTable, size: int) -> dict[str, float]:
        """The limit of bytes of each kind."""
        return dict(zip(table.menu.kinds, table.gradient_bytes[:, size].tolist(), strict=True))

    def realise(self, draft: Draft) -> Found | None:
        """The best plan with the boundaries that a draft suggests."""
        table = draft.table
        found = []
        for level, size in draft.cells:
            cuts = {
                table.cuts(draft.stages, level, size, direction)
                for direction in range(table.prices.shape[1])
                if math.isfinite(table.whole[draft.stages - 1, level, size, direction])
            }
            for each in sorted(cuts):
                one = self.bench.best_of_cuts(
                    draft.selection.sites,
                    micro_batch=table.menu.micro_batch,
                    cuts=each,
                    replicas=draft.replicas,
                    synced=self.synced(table, size),
                )
                if one is not None:
                    found.append(one)
        return min(found, key=lambda f: f.worth, default=None)


def uniform_cuts(layers: int, stages: int) -> tuple[int, ...]:
    """The published split: equal stages, one more layer in each of the last ones."""
    each, rest = divmod(layers, stages)
    sizes = [each + (s >= stages - rest) for s in range(stages)]
    return tuple(itertools.accumulate(sizes, initial=0))
