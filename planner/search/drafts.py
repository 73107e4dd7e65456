"""Starting points of the search: pipeline mixes ranked by rough times and prices.

Templates on one or two lots, on few GPUs on more, are ranked by the rough objective of a plan in
which each alone does all the work. Mixes are filled with the best of them, also with fewer
pipelines where that may be better. A rough time costs microseconds, so thousands of mixes are
drafted for each one that is judged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from planner.pipelines.pipeline_mix import (
    PipelineMix,
    placements,
    room_for,
    rough_seconds,
    seconds_of,
    take,
)
from planner.pipelines.pipeline_template import (
    Template,
    TemplateMaker,
    stage_options,
    stage_sequences,
)
from planner.pipelines.stage_memory import TemplateStage
from planner.problem.inventory import Lot, LotQuota
from planner.problem.objective import FREE_USD_PER_HOUR, Limits
from planner.search.packing import best_packing
from planner.search.rough_sums import RoughSums
from planner.search.stage_limits import StageTimeTables
from simulator.arrays import Floats
from simulator.documents.problems import InputError, Problem
from simulator.estimate.event_estimator import EventEstimator
from simulator.spec.job import Job

STAGES_MAX = 12
"""Most stages of a drafted pipeline."""
TEMPLATES_PER_LOT = 5
PAIRS_KEPT = 4
THREES_KEPT = 3
SMALLER = (0.75, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.125)
SMALLER_MIXED = (0.75, 0.5, 0.35, 0.25)
"""Shares of the pipelines that fit, tried where dollars count."""
FEW = (1, 2, 4)
"""Numbers of pipelines tried in mixes of one template, where dollars count."""
PACKED = 3
"""Number of iteration times for which the master problem is solved, one after the other."""
PACKED_WHOLE = 1e-6
"""A count this close below a whole number is taken as that number."""
FREE_ZONES = 1000.0
"""Factor on the rough dollars of free GPUs for each further zone."""
FAMILIES_SHARE = 0.5
"""Share of the drafts judged that goes to the best of each family."""
LOTS_MAX = 5
"""Most lots of which every subset is tried."""
SMALL_GPUS = 32
"""Most GPUs with which pipelines over three lots or more, and single ones, are tried."""
SMALL_LOTS = 4
"""Most lots of a template in a mix on such a cluster; on a larger one it is 2."""
KINDS_MAX = 6
"""With more kinds of GPUs only sets of one, of two, of all but one, and of all are tried."""
TABLE_MAX = 10**8
"""Entries of a table of stage times above which a search would take all memory."""
USUAL_MAX = 64
"""Micro batch sizes up to this are always drafted, and so are those that the job names."""
SINGLE_MAX = 24
"""Most single pipelines that are judged."""
SINGLE_DRAFTS = 150
"""Most single pipelines that are drafted for each micro batch size."""


@dataclass(slots=True, eq=False)
class EventDrafts:
    """The inputs of a search, and the mixes that it starts from."""

    job: Job
    lots: tuple[Lot, ...]
    grants: tuple[LotQuota, ...]
    maker: TemplateMaker
    judge: EventEstimator
    limits: Limits
    micro_batches: tuple[int, ...]
    degrees: tuple[int, ...]
    width: float = field(default=1.0, kw_only=True)
    """The budget as a multiple of the default one: a wider search drafts and improves more."""
    _templates: dict[tuple[tuple[int, ...], int], list[Template]] = field(
        init=False, default_factory=dict
    )
    _twins: dict[object, tuple[int, ...]] = field(init=False, default_factory=dict)
    sums: RoughSums = field(init=False)
    """Rough times of gradient sums."""
    tables: StageTimeTables = field(init=False)
    """Lower bounds of stage times."""
    alone: TemplateMaker = field(init=False)
    """Maker of templates that may fit only as the single pipeline of a plan."""

    drafted: tuple[int, ...] = field(init=False)
    """The micro batch sizes that are drafted; small changes reach the rest."""

    def __post_init__(self) -> None:
        self.alone = self.maker.alone()
        self.sums = RoughSums(self.maker, self.lots)
        self.tables = StageTimeTables(
            self.maker,
            self.lots,
            degrees=self.degrees,
            recompute=self.job.recompute,
            per_layer_sync=self.judge.overlaps,
        )
        if self.tables.table_size > TABLE_MAX:
            layers, ways = self.tables.costs.layer_count, len(self.tables.choices)
            what = f"has {layers:,} layers, too many to search with {ways} GPU kinds and TP degrees"
            cure = "describe several layers as one, or give fewer kinds or a smaller max_tp"
            raise InputError(Problem(f"model {self.job.model.name}", what, cure))
        self.micro_batches = tuple(itertools.takewhile(self._may_fit, self.micro_batches))
        self.drafted = tuple(b for b in self.micro_batches if self._may_keep_all_busy(b))

    def _may_fit(self, micro_batch: int) -> bool:
        """Whether each layer fits somewhere; no plan has this micro batch size otherwise."""
        if micro_batch <= USUAL_MAX:
            return True
        room = self.tables.room(micro_batch, 1, sum(lot.gpus for lot in self.lots))
        layers = range(self.tables.costs.layer_count)
        return all(bool((room[:, n, n + 1] >= 1).any()) for n in layers)

    def _may_keep_all_busy(self, micro_batch: int) -> bool:
        """Whether a large size has as many micro batches as GPUs need: one for each group.

        Sizes that the job names are always drafted: it may name no smaller ones.
        """
        if self.job.micro_batches or micro_batch <= USUAL_MAX:
            return True
        groups = sum(lot.gpus for lot in self.lots) / max(self.degrees)
        return self.job.global_batch // micro_batch >= groups

    def ranked(self, mixes: list[PipelineMix]) -> list[PipelineMix]:
        """Mixes by their rough objective, best first."""
        if not mixes:
            return []
        totals = [self.job.global_batch // mix.templates[0].micro_batch for mix in mixes]
        seconds = rough_seconds(mixes, totals).tolist()
        scores = [self.rough(*pair) for pair in zip(mixes, seconds, strict=True)]
        order = sorted(range(len(mixes)), key=lambda n: (scores[n], n))
        return [mixes[n] for n in order if scores[n] < math.inf]

    def ranked_in_placements(self, mixes: Iterable[PipelineMix]) -> list[PipelineMix]:
        """Mixes by their rough objective in the better one of two placements, best first."""
        placed = list(mixes)
        placed += [p for mix in placed for p in placements(mix, self.lots) if p.together == 1]
        return list(dict.fromkeys(replace(mix, together=None) for mix in self.ranked(placed)))

    def mixes(self) -> Iterator[PipelineMix]:
        """Distinct mixes to start from."""
        seen = set()
        for b in self.drafted:
            total = self.job.global_batch // b
            pure = {lot: self.templates((lot,), b, total) for lot in range(len(self.lots))}
            for chosen in self.lot_sets():
                for whole in self._mixes_of(chosen, pure, b, total):
                    for mix in self._list_smaller(whole, total) if whole.counts else ():
                        if mix not in seen:
                            seen.add(mix)
                            yield mix

    def _list_smaller(self, mix: PipelineMix, total: int) -> Iterator[PipelineMix]:
        """The mix, and mixes with fewer pipelines: cheaper, or with less to synchronise."""
        yield mix
        if self.limits.needs_prices:
            for share in SMALLER if len(mix.counts) == 1 else SMALLER_MIXED:
                yield replace(mix, counts=tuple(math.ceil(n * share) for n in mix.counts))
            if len(mix.counts) == 1:
                # Few pipelines spend the least time in bubbles and have little to synchronise.
                yield from (replace(mix, counts=(n,)) for n in FEW if n < mix.counts[0])
        elif len(mix.counts) == 1:
            # The fewest pipelines with as many rounds of micro batches, or one or two more.
            most = mix.counts[0]
            rounds = -(-total // most)
            fewer = [-(-total // (rounds + more)) for more in range(3)]
            # Also few enough pipelines that the replicas of a stage share a machine.
            size = max(self.lots[lot].gpus_per_machine for lot, _ in mix.templates[0].gpus)
            fewer += [n for n in range(2, min(size, most)) if size % n == 0]
            for count in dict.fromkeys(fewer):
                yield replace(mix, counts=(count,))

    def lot_sets(self) -> list[tuple[int, ...]]:
        """The subsets of lots to use together."""
        every = range(len(self.lots))
        if len(self.lots) <= LOTS_MAX:
            return [
                chosen
                for size in range(1, len(self.lots) + 1)
                for chosen in itertools.combinations(every, size)
            ]
        found: dict[tuple[int, ...], None] = {(lot,): None for lot in every}
        kinds = sorted({lot.gpu for lot in self.lots})
        zones = sorted({lot.zone for lot in self.lots})
        count = len(kinds)
        sizes = range(1, count + 1) if count <= KINDS_MAX else (1, 2, count - 1, count)
        for size in sizes:
            for some in itertools.combinations(kinds, size):
                found[tuple(k for k in every if self.lots[k].gpu in some)] = None
        for size in range(1, len(zones) + 1):
            found[tuple(k for k in every if self.lots[k].zone in zones[:size])] = None
            found[tuple(k for k in every if self.lots[k].zone == zones[size - 1])] = None
        return list(found)

    def templates(self, lots: tuple[int, ...], micro_batch: int, total: int) -> list[Template]:
        """The best templates on some lots."""
        key = (lots, micro_batch)
        if key not in self._templates:
            # Lots with the same machines in other zones suit the same templates.
            kind = (self._offers(lots), micro_batch)
            if kind not in self._twins:
                found = self._sort_templates(lots, micro_batch, total)[
                    : self.kept(TEMPLATES_PER_LOT)
                ]
                self._templates[key], self._twins[kind] = found, lots
            else:
                twin = self._twins[kind]
                lot_of = dict(zip(twin, lots, strict=True))
                self._templates[key] = [
                    self.maker.timed(
                        tuple(replace(stage, lot=lot_of[stage.lot]) for stage in t.stages),
                        micro_batch,
                        t.cuts,
                    )
                    for t in self._templates[twin, micro_batch]
                ]
        return self._templates[key]

    def _offers(self, lots: tuple[int, ...]) -> tuple[object, ...]:
        """What templates depend on, apart from the distance between zones."""
        some = [self.lots[lot] for lot in lots]
        zones = sorted({lot.zone for lot in some})
        return tuple(
            (
                *(lot.gpu, lot.machine, lot.machines, zones.index(lot.zone)),
                lot.price_usd_per_gpu_hour if self.limits.needs_prices else None,
                tuple(grant.gpus_max for grant in self.grants if number in grant.lots),
            )
            for number, lot in zip(lots, some, strict=True)
        )

    def _sort_templates(
        self, lots: tuple[int, ...], micro_batch: int, total: int
    ) -> list[Template]:
        options = stage_options(self.lots, lots, self.degrees, self.job.recompute)
        found: list[PipelineMix] = []
        for stages in stage_sequences(lots, options, min(STAGES_MAX, self.maker.costs.layer_count)):
            if len(lots) > 1 and len({stage.lot for stage in stages}) < len(lots):
                continue
            template = self.maker.template(stages, micro_batch, total)
            if template is None:
                continue
            count = min(room_for(template, self.lots, {}, self.grants), total)
            if count:
                # Rate it as if this template did all the work.
                found += self._list_smaller(PipelineMix((template,), (count,)), total)
        if not found:
            return []
        passes = rough_seconds(found, [total] * len(found)).tolist()
        scores = [self.rough(mix, s) for s, mix in zip(passes, found, strict=True)]
        order = sorted(range(len(found)), key=scores.__getitem__)
        return list(dict.fromkeys(found[n].templates[0] for n in order))

    def _mixes_of(
        self, chosen: tuple[int, ...], pure: dict[int, list[Template]], micro_batch: int, total: int
    ) -> Iterator[PipelineMix]:
        for first in range(self.kept(TEMPLATES_PER_LOT)):
            some = [pure[lot][min(first, len(pure[lot]) - 1)] for lot in chosen if pure[lot]]
            yield self.filled([], some, total)
        if len(chosen) <= 3:
            kept = self.kept(TEMPLATES_PER_LOT if len(chosen) <= 2 else THREES_KEPT)
            lists = [pure[lot][:kept] for lot in chosen if pure[lot]]
            if lists:
                for each in itertools.product(*lists):
                    yield self.filled([], list(each), total)
        if 2 <= len(chosen) <= LOTS_MAX:
            rest = [pure[lot][0] for lot in chosen if pure[lot]]
            pool = [template for lot in chosen for template in pure[lot]]
            for size in range(2, 1 + (min(len(chosen), SMALL_LOTS) if self.is_small else 2)):
                for some_lots in itertools.combinations(chosen, size):
                    for mixed in self.templates(some_lots, micro_batch, total)[
                        : self.kept(PAIRS_KEPT)
                    ]:
                        pool.append(mixed)
                        yield self.filled([mixed], rest, total)
                        yield self.filled([mixed], [], total)
            staying = [t for t in pool if len({self.lots[lot].zone for lot, _ in t.gpus}) == 1]
            for some in [pool, staying] if staying != pool else [pool]:
                yield from self._pack(some, total)

    def _pack(self, pool: list[Template], total: int) -> Iterator[PipelineMix]:
        """Mixes of any templates, from the master problem: the most micro batches within a time.

        The time begins with that of a simple mix, and is then the one that the last mix needs.
        """
        uses = np.zeros((len(self.lots) + len(self.grants), len(pool)))
        for column, template in enumerate(pool):
            for (lot, tp), groups in template.gpus.items():
                uses[lot, column] += tp * groups
        for row, grant in enumerate(self.grants, len(self.lots)):
            uses[row] = uses[list(grant.lots)].sum(axis=0)
        limits = (*(lot.gpus for lot in self.lots), *(grant.gpus_max for grant in self.grants))
        room = np.array(limits, dtype=float)
        mix = self.filled([], pool, total)
        for _ in range(PACKED if pool else 0):
            seconds = seconds_of(mix, total) + self.sums.seconds(mix)
            runs = np.array([self._runs(t, mix.pipelines, seconds) for t in pool])
            counts = best_packing(runs, uses, room)
            chosen = [n for n in np.argsort(-counts, kind="stable") if counts[n] > 0]
            found = self._round_counts([pool[n] for n in chosen], counts[chosen], total)
            if not found.counts or found == mix:
                return
            yield found
            mix = found

    def _runs(self, template: Template, pipelines: int, seconds: float) -> float:
        """Micro batches of a pipeline within a time, its gradient sums included."""
        left = seconds - self.sums.seconds(PipelineMix((template,), (pipelines,))) - template.fill_s
        return 0.0 if left < 0 else 1 + left / template.level_s

    def _round_counts(self, templates: list[Template], counts: Floats, total: int) -> PipelineMix:
        """Whole numbers of pipelines near these, and as many more as fit."""
        taken: dict[int, dict[int, int]] = {}
        whole = [0] * len(templates)
        for share in (counts + PACKED_WHOLE, [float(total)] * len(templates)):
            for n, template in enumerate(templates):
                left = min(int(share[n]) - whole[n], total - sum(whole))
                count = min(room_for(template, self.lots, taken, self.grants), left)
                if count > 0:
                    whole[n] += count
                    take(taken, template, count)
        used = [n for n, count in enumerate(whole) if count]
        return PipelineMix(tuple(templates[n] for n in used), tuple(whole[n] for n in used))

    def kept(self, usual: int) -> int:
        """How many templates are kept; mixes of two of them grow with the budget."""
        return int(usual * math.sqrt(self.width))

    @property
    def is_small(self) -> bool:
        """Whether the cluster has few GPUs."""
        return sum(lot.gpus for lot in self.lots) <= SMALL_GPUS

    def single_pipelines(self) -> list[PipelineMix]:
        """On few GPUs the quickest single pipelines that would not fit beside others.

        A single pipeline reserves no memory for gradient sums.
        """
        if not self.is_small:
            return []
        found: dict[PipelineMix, None] = {}
        stages_max = min(STAGES_MAX, self.maker.costs.layer_count)
        for b in self.drafted:
            total = self.job.global_batch // b
            end = len(found) + SINGLE_DRAFTS
            for stages in self._sequences(stages_max):
                if len(found) == end:
                    break
                if self.maker.template(stages, b, total) is not None:
                    continue
                template = self.alone.template(stages, b, total)
                if template is not None and room_for(template, self.lots, {}, self.grants):
                    found[PipelineMix((template,), (1,))] = None
        return self.ranked(list(found))[:SINGLE_MAX]

    def _sequences(self, stages_max: int) -> Iterator[tuple[TemplateStage, ...]]:
        """Sequences of stages on each set of lots, the largest sets first."""
        for lots in reversed(self.lot_sets()):
            options = stage_options(self.lots, lots, self.degrees, self.job.recompute)
            for stages in stage_sequences(lots, options, stages_max):
                if len({stage.lot for stage in stages}) == len(lots):
                    yield stages

    def filled(self, first: list[Template], rest: list[Template], total: int) -> PipelineMix:
        """As many pipelines as fit of each template in turn, up to one per micro batch."""
        taken: dict[int, dict[int, int]] = {}
        templates: list[Template] = []
        counts: list[int] = []
        for template in [*first, *rest]:
            count = min(room_for(template, self.lots, taken, self.grants), total - sum(counts))
            if count <= 0 or template in templates:
                continue
            templates.append(template)
            counts.append(count)
            take(taken, template, count)
        return PipelineMix(tuple(templates), tuple(counts))

    def rough(self, mix: PipelineMix, seconds: float) -> float:
        """Rough objective of an iteration, given the rough time of its passes."""
        seconds += self.sums.seconds(mix)
        if not self.limits.needs_prices:
            return seconds
        hourly = sum(
            (self.lots[lot].price_usd_per_gpu_hour or 0.0) * tp * groups
            for lot, of_lot in mix.groups().items()
            for tp, groups in of_lot.items()
        )
        if not hourly:
            # Free GPUs are ranked by time, those of several zones last: they may cost egress.
            zones = {self.lots[lot].zone for lot in mix.groups()}
            hourly = FREE_USD_PER_HOUR * FREE_ZONES ** (len(zones) - 1)
        return self.limits.draft_score(seconds, hourly)

    def best_per_family_first(self, ranked: list[PipelineMix], count: int) -> list[PipelineMix]:
        """Put the best mix of each family before the second of any, for a share of ``count``."""
        firsts: dict[object, PipelineMix] = {}
        for mix in ranked:
            firsts.setdefault(family_of(mix), mix)
        some = list(firsts.values())[: int(count * FAMILIES_SHARE)]
        chosen = set(some)
        return some + [mix for mix in ranked if mix not in chosen]


def family_of(mix: PipelineMix) -> object:
    """The family of a mix: its lots, TP degrees, stage counts, micro batch and placement."""
    used = {(stage.lot, stage.tp) for template in mix.templates for stage in template.stages}
    depths = {len(template.stages) for template in mix.templates}
    return mix.templates[0].micro_batch, frozenset(used), frozenset(depths), mix.together
