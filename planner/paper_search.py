"""The search under the paper estimator: families by bound, boundaries by reach, then polish."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.families import (
    Array,
    Menu,
    Rings,
    bounds_of,
    menu_of,
    price_directions,
    rings_of,
)
from planner.limits import Figures, Limits
from planner.mixing import Site
from planner.paper_model import PaperModel, Shape, Verdict
from planner.polish import Found, Workbench
from planner.reach import ReachTable, reach_table

LEVEL_RATIO = 1.05
"""Neighbouring limits of a stage's time; polishing finds what lies between."""
SYNC_STEPS = 6
DRAFTS = 12
"""Families whose drafts are judged."""
POLISHED = 3


@dataclass(frozen=True, slots=True)
class Selection:
    """Lots to use, and the sites within which pipelines stay."""

    sites: tuple[Site, ...]

    @property
    def lots(self) -> tuple[int, ...]:
        return tuple(sorted({lot for site in self.sites for lot in site.lots}))


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A family of a selection at its best limits, by a rough estimate."""

    rough: float
    selection: Selection
    table: ReachTable
    replicas: int
    stages: int
    level: int
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The best shape found, and what every plan takes at least."""

    best: Found | None
    bound_s: float
    evaluations: int
    found: tuple[Found, ...]


@dataclass(slots=True, eq=False)
class PaperSearch:
    """One search; it holds what its steps share."""

    model: PaperModel
    limits: Limits
    micro_batches: tuple[int, ...]
    max_tp: int
    budget: int
    bench: Workbench = field(init=False)

    def __post_init__(self) -> None:
        self.bench = Workbench(
            self.model,
            self.max_tp,
            self.worth,
            by_price=self.limits.goal_is_cost,
            budget=self.budget,
        )

    def worth(self, verdict: Verdict, shape: Shape) -> tuple[float, ...] | None:
        figures = Figures(verdict.seconds, verdict.usd, self.spot_share(shape))
        found = self.limits.worth(figures)
        return None if found is None else (*found, shape.micro_batch, shape.stages)

    def spot_share(self, shape: Shape) -> float:
        used: dict[int, int] = {}
        for column in shape.columns:
            for lot, tp, count in column:
                used[lot] = used.get(lot, 0) + tp * count
        lots = self.model.lots
        spot = sum(
            max(0, gpus - (lots[lot].gpus - lots[lot].spot_gpus)) for lot, gpus in used.items()
        )
        return spot / sum(used.values())

    # -- the steps ------------------------------------------------------------------------------

    def run(self) -> Result:
        drafts: list[Draft] = []
        best = math.inf
        for selection in selections(self.model):
            for draft in self.drafts(selection, best):
                drafts.append(draft)
                best = min(best, draft.rough)
        drafts.sort(key=lambda d: d.rough)
        found: list[tuple[Found, Draft]] = []
        for draft in drafts[:DRAFTS]:
            one = self.realise(draft)
            if one is not None:
                found.append((one, draft))
        found.sort(key=lambda pair: pair[0].worth)
        polished = []
        for one, draft in found[:POLISHED]:
            replicas = self.replica_counts(one.shape.micro_batch)
            polished.append(self.bench.polish(one, draft.selection.sites, replicas))
        polished.sort(key=lambda f: f.worth)
        return Result(
            polished[0] if polished else None,
            self.bound(),
            self.bench.evaluations,
            tuple(one for one, _ in found),
        )

    def replica_counts(self, micro_batch: int) -> list[int]:
        """For each number of micro batches the fewest pipelines that need no more."""
        total = self.model.global_batch // micro_batch
        gpus = sum(lot.gpus for lot in self.model.lots)
        return [
            count
            for count in sorted({-(-total // most) for most in range(1, total + 1)})
            if count <= gpus
        ]

    def families(
        self, micro_batch: int, sites: Sequence[Sequence[int]], *, hopeful: bool
    ) -> tuple[Menu, Rings, Array, Array, Array] | None:
        """Menu, rings, replica counts, stage counts and bounds of one micro batch size."""
        menu = menu_of(self.model, micro_batch, max_tp=self.max_tp, sites=sites, hopeful=hopeful)
        if menu is None:
            return None
        counts = [c for c in self.replica_counts(micro_batch) if c <= menu.gpus.sum()]
        lots = sorted({lot for site in sites for lot in site})
        rings = rings_of(self.model, counts, lots=lots, hopeful=hopeful)
        replicas = np.array(counts, dtype=float)
        total = self.model.global_batch // micro_batch
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
        return menu, rings, replicas, stages, bounds

    def bound(self) -> float:
        """What every plan takes at least."""
        sites = [tuple(range(len(self.model.lots)))]
        every = [
            family[-1].min()
            for b in self.micro_batches
            if (family := self.families(b, sites, hopeful=True)) is not None
        ]
        return float(min(every, default=math.inf))

    def drafts(self, selection: Selection, best: float) -> Iterator[Draft]:
        sites = [site.lots for site in selection.sites]
        for b in self.micro_batches:
            family = self.families(b, sites, hopeful=False)
            if family is None:
                continue
            menu, rings, replicas, stages, bounds = family
            keep = bounds < best
            if not keep.any():
                continue
            yield from self._drafts(selection, menu, rings, replicas, bounds, keep, best)

    def _drafts(
        self,
        selection: Selection,
        menu: Menu,
        rings: Rings,
        replicas: Array,
        bounds: Array,
        keep: Array,
        best: float,
    ) -> Iterator[Draft]:
        model = self.model
        most = np.ceil(model.global_batch // menu.micro_batch / replicas)
        rows, columns = np.nonzero(keep)
        slowest = menu.seconds[:, -1].max() + 2 * menu.send_s[np.isfinite(menu.send_s)].max(
            initial=0
        )
        high = slowest if math.isinf(best) else min(slowest, float((best / most[rows]).max()))
        low = menu.seconds[:, -1].min() / (columns.max() + 1)
        steps = max(1, math.ceil(math.log(max(high / low, 1.001)) / math.log(LEVEL_RATIO)))
        levels = low * LEVEL_RATIO ** np.arange(1, steps + 1)
        whole = float(model.gradient_bytes()[-1])
        least = float(rings.sizes[rings.sizes >= whole / 4 / model.layers].min())
        sizes = np.unique(np.geomspace(least, whole, SYNC_STEPS))
        directions = price_directions(len(menu.kinds))
        prices = directions[:, menu.kind] * menu.tp / menu.gpus[menu.kind]
        table = reach_table(
            model,
            menu,
            levels_s=levels,
            gradient_bytes=sizes,
            prices=prices,
            stages_max=int(columns.max()) + 1,
        )
        need = table.whole.max(axis=-1)
        for row in np.unique(rows):
            sync = np.array([rings.at(int(row), size) for size in sizes])
            for column in columns[rows == row]:
                possible = need[column] * replicas[row] <= 1 + 1e-9
                rough = (most[row] - 1 + column + 1) * levels[:, None] + sync[None, :]
                rough = np.where(possible, rough, np.inf)
                at = int(np.argmin(rough))
                if math.isfinite(rough.flat[at]):
                    level, size = divmod(at, len(sizes))
                    yield Draft(
                        float(rough.flat[at]),
                        selection,
                        table,
                        int(replicas[row]),
                        int(column) + 1,
                        level,
                        size,
                    )

    def realise(self, draft: Draft) -> Found | None:
        """The best plan with the boundaries that a draft suggests."""
        table = draft.table
        cuts = {
            table.cuts(draft.stages, draft.level, draft.size, direction)
            for direction in range(len(table.prices))
            if math.isfinite(table.whole[draft.stages - 1, draft.level, draft.size, direction])
        }
        found = [
            one
            for each in sorted(cuts)
            if (
                one := self.bench.best_of_cuts(
                    draft.selection.sites,
                    micro_batch=table.menu.micro_batch,
                    cuts=each,
                    replicas=draft.replicas,
                    synced_bytes=float(table.gradient_bytes[draft.size]),
                )
            )
            is not None
        ]
        return min(found, key=lambda f: f.worth, default=None)


def selections(model: PaperModel) -> Iterator[Selection]:
    """Which kinds and zones to use together, small selections first."""
    kinds = sorted({lot.gpu for lot in model.lots})
    zones = sorted({lot.zone for lot in model.lots})
    kind_sets = [
        chosen
        for size in range(1, len(kinds) + 1)
        for chosen in itertools.combinations(kinds, size)
    ]
    zone_sets = [(zone,) for zone in zones]
    zone_sets += [tuple(zones[:size]) for size in range(2, len(zones) + 1)]
    seen = set()
    for chosen in kind_sets:
        for where in zone_sets:
            sites = [
                tuple(
                    k for k, lot in enumerate(model.lots) if lot.zone == zone and lot.gpu in chosen
                )
                for zone in where
            ]
            sites = [site for site in sites if site]
            if not sites or {model.lots[k].gpu for site in sites for k in site} != set(chosen):
                continue
            splits = [tuple(Site(site) for site in sites)]
            if len(sites) > 1:
                splits.append((Site(tuple(k for site in sites for k in site)),))
            for split in splits:
                if split not in seen:
                    seen.add(split)
                    yield Selection(split)
