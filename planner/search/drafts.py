"""Starting points of the search: pipeline mixes ranked by rough times and prices.

Templates on one or two lots, on few GPUs on more, are ranked by the rough objective of a plan in
which each alone does all the work. Mixes are filled with the best of them, also with fewer
pipelines where that may be better. A rough time costs microseconds, so thousands of mixes are
drafted for each one that is judged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from planner.pipelines.pipeline_mix import PipelineMix, room_for, rough_seconds, take
from planner.pipelines.pipeline_template import (
    Template,
    TemplateMaker,
    TemplateStage,
    stage_options,
    stage_sequences,
)
from planner.problem.inventory import Grant, Lot
from planner.problem.job_options import recompute_choices
from planner.problem.objective import Limits
from planner.search.pricing import quickest_equal_pipelines
from planner.search.stage_limits import StageTimeTables
from simulator.estimate.event_estimator import EventEstimator
from simulator.spec.job import Job
from simulator.spec.plan import Recompute

STAGES_MAX = 12
"""Stages of a drafted pipeline."""
TEMPLATES_PER_LOT = 5
PAIRS_KEPT = 4
THREES_KEPT = 3
SMALLER = (0.75, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.125)
SMALLER_MIXED = (0.75, 0.5, 0.35, 0.25)
"""Shares of the pipelines that fit, tried where fewer may be better, ..."""
FEW = (1, 2, 4)
"""... and numbers of pipelines, where dollars count."""
ROUGH_BREACH = 40.0
"""Penalty slope for limits that a draft breaks by its rough figures."""
FAMILIES_SHARE = 0.5
"""Share of the drafts judged that goes to the best of each family."""
EQUAL_MAX = 12
"""Mixes of equal pipelines that are judged."""
EQUAL_LOTS_MAX = 2
"""Lots on which equal pipelines are searched for."""
EQUAL_TABLE_MAX = 60_000
"""With larger tables, the search for equal pipelines takes too long."""
LOTS_MAX = 5
"""Up to this many lots, every subset of them is tried."""
SMALL_GPUS = 32
"""With at most this many GPUs, pipelines over three lots or more, and single ones, are tried."""
SMALL_LOTS = 4
"""Most lots of a drafted pipeline."""
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
    grants: tuple[Grant, ...]
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
    _syncs: dict[object, float] = field(init=False, default_factory=dict)
    _steps: dict[object, float] = field(init=False, default_factory=dict)
    tables: StageTimeTables = field(init=False)
    """Lower bounds of stage times."""
    alone: TemplateMaker = field(init=False)
    """Also makes templates that fit only as the single pipeline of a plan."""

    drafted: tuple[int, ...] = field(init=False)
    """The micro batch sizes that are drafted; small changes lead to the others."""

    def __post_init__(self) -> None:
        self.alone = self.maker.alone()
        self.tables = StageTimeTables(
            self.maker,
            self.lots,
            degrees=self.degrees,
            recomputes=self.recomputes,
            per_layer_sync=self.judge.overlaps,
        )
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

        Sizes that the job names are drafted in any case: smaller ones may be none of them.
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

    def mixes(self) -> Iterator[PipelineMix]:
        """Distinct mixes to start from."""
        seen = set()
        for b in self.drafted:
            total = self.job.global_batch // b
            pure = {lot: self.templates((lot,), b, total) for lot in range(len(self.lots))}
            for chosen in self.lot_sets():
                for whole in self._mixes_of(chosen, pure, b, total):
                    for mix in self._smaller(whole, total) if whole.counts else ():
                        if mix not in seen:
                            seen.add(mix)
                            yield mix

    def _smaller(self, mix: PipelineMix, total: int) -> Iterator[PipelineMix]:
        """The mix, and mixes with fewer pipelines: cheaper, or with less to synchronise."""
        yield mix
        if self.limits.needs_prices:
            for share in SMALLER if len(mix.counts) == 1 else SMALLER_MIXED:
                yield replace(mix, counts=tuple(math.ceil(n * share) for n in mix.counts))
            if len(mix.counts) == 1:
                # Few pipelines spend the least time in bubbles and have little to synchronise.
                yield from (replace(mix, counts=(n,)) for n in FEW if n < mix.counts[0])
        elif len(mix.counts) == 1:
            # The fewest pipelines that need no more rounds of micro batches.
            most = mix.counts[0]
            rounds = -(-total // most)
            fewer = [-(-total // (rounds + more)) for more in range(3)]
            # Or few enough that the replicas of a stage share a machine.
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
        for size in range(1, len(kinds) + 1):
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
                found = self._sorted_templates(lots, micro_batch, total)[
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
            )
            for lot in some
        )

    def _sorted_templates(
        self, lots: tuple[int, ...], micro_batch: int, total: int
    ) -> list[Template]:
        options = stage_options(self.lots, lots, self.degrees, self.recomputes)
        found: list[PipelineMix] = []
        for stages in stage_sequences(lots, options, min(STAGES_MAX, self.maker.costs.layer_count)):
            if len(lots) > 1 and len({stage.lot for stage in stages}) < len(lots):
                continue
            template = self.maker.template(stages, micro_batch, total)
            if template is None:
                continue
            count = min(room_for(template, self.lots, {}), total)
            if count:
                # Rate it as if this template did all the work.
                found += self._smaller(PipelineMix((template,), (count,)), total)
        if not found:
            return []
        passes = rough_seconds(found, [total] * len(found)).tolist()
        scores = [self.rough(mix, s) for s, mix in zip(passes, found, strict=True)]
        order = sorted(range(len(found)), key=scores.__getitem__)
        return list(dict.fromkeys(found[n].templates[0] for n in order))

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """The recomputation choices that the job allows."""
        return recompute_choices(self.job)

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
            for size in range(2, 1 + (min(len(chosen), SMALL_LOTS) if self.is_small else 2)):
                for some_lots in itertools.combinations(chosen, size):
                    for mixed in self.templates(some_lots, micro_batch, total)[
                        : self.kept(PAIRS_KEPT)
                    ]:
                        yield self.filled([mixed], rest, total)
                        yield self.filled([mixed], [], total)

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
                if template is not None and room_for(template, self.lots, {}):
                    found[PipelineMix((template,), (1,))] = None
        return self.ranked(list(found))[:SINGLE_MAX]

    def _sequences(self, stages_max: int) -> Iterator[tuple[TemplateStage, ...]]:
        """Sequences of stages on each set of lots, the largest sets first."""
        for lots in reversed(self.lot_sets()):
            options = stage_options(self.lots, lots, self.degrees, self.recomputes)
            for stages in stage_sequences(lots, options, stages_max):
                if len({stage.lot for stage in stages}) == len(lots):
                    yield stages

    def filled(self, first: list[Template], rest: list[Template], total: int) -> PipelineMix:
        """As many pipelines as fit of each template in turn, up to one per micro batch."""
        taken: dict[int, dict[int, int]] = {}
        templates: list[Template] = []
        counts: list[int] = []
        for template in [*first, *rest]:
            count = min(room_for(template, self.lots, taken), total - sum(counts))
            if count <= 0 or template in templates:
                continue
            templates.append(template)
            counts.append(count)
            take(taken, template, count)
        return PipelineMix(tuple(templates), tuple(counts))

    def rough(self, mix: PipelineMix, seconds: float) -> float:
        """Rough objective of an iteration, given the rough time of its passes."""
        seconds += self._sync_s(mix)
        if not self.limits.needs_prices:
            return seconds
        hourly = sum(
            (self.lots[lot].price_usd_per_gpu_hour or 0.0) * tp * groups
            for lot, of_lot in mix.groups().items()
            for tp, groups in of_lot.items()
        )
        usd = hourly / 3600 * seconds
        score = usd if self.limits.goal_is_cost else seconds
        for value, most in self.limits.capped(seconds, usd, hourly):
            if value > most:
                # Rough times prove nothing, so rank a draft that breaks a limit lower rather than
                # drop it.
                score *= 1 + ROUGH_BREACH * (value / max(most, 1e-12) - 1)
        return score

    def _sync_s(self, mix: PipelineMix) -> float:
        members = mix.pipelines
        if members < 2:
            return 0.0
        used = sorted({key for template in mix.templates for key in template.gpus})[:6]
        synced = [pair for template in mix.templates for pair in template.synced]
        most = max(size for size, _ in synced)
        near = self._is_near(mix, used)
        piece = min(self.maker.costs.runtime.sync_bucket_bytes, most)
        key = (*used, members, piece, near)
        per_byte = self._syncs.get(key)
        if per_byte is None:
            pairs = [(one, other) for one in used for other in used]
            per_byte = max(self._step_s(*pair, piece / members, near=near) for pair in pairs)
            per_byte *= 2 * (members - 1) / piece
            self._syncs[key] = per_byte
        return max(0.0, *(per_byte * size - home for size, home in synced))

    def _is_near(self, mix: PipelineMix, used: list[tuple[int, int]]) -> bool:
        """Whether all replicas of a stage are on one machine, placed side by side."""
        if len({lot for lot, _ in used}) > 1:
            return False
        lot = self.lots[used[0][0]]
        side_by_side = mix.together is None and all(
            lot.gpus_per_machine % (mix.pipelines * tp) == 0 for _, tp in used
        )
        gpus = sum(tp * n for tp, n in mix.groups()[used[0][0]].items())
        return side_by_side or gpus <= lot.gpus_per_machine

    def _step_s(
        self, one: tuple[int, int], other: tuple[int, int], bytes_each: float, *, near: bool
    ) -> float:
        """Rough seconds of one ring step over this hop, within a machine or between two."""
        key = (one, other, bytes_each, near)
        if key not in self._steps:
            a, b = self.lots[one[0]].place, self.lots[other[0]].place
            flows, network = min(one[1], other[1]), self.maker.network
            self._steps[key] = (
                network.within_node(a, gpus=2 * flows, bytes_each=bytes_each)
                if near
                else network.ring_between_nodes(a, b, flows=flows, bytes_each=bytes_each)
            )
        return self._steps[key]

    def best_per_family_first(self, ranked: list[PipelineMix], count: int) -> list[PipelineMix]:
        """Put the best mix of each family before the second of any, for a share of ``count``."""
        firsts: dict[object, PipelineMix] = {}
        for mix in ranked:
            firsts.setdefault(family_of(mix), mix)
        some = list(firsts.values())[: int(count * FAMILIES_SHARE)]
        chosen = set(some)
        return some + [mix for mix in ranked if mix not in chosen]

    def equal_pipelines(self, longest_s: float | None) -> list[PipelineMix]:
        """The quickest equal pipelines on each of the largest lots.

        They take at most ``longest_s``; any time if that is ``None``.
        """
        found: list[tuple[float, PipelineMix]] = []
        shapes: dict[object, int] = {}
        for index in sorted(range(len(self.lots)), key=lambda n: (-self.lots[n].gpus, n)):
            shapes.setdefault((self.lots[index].gpu, self.lots[index].machine), index)
        for lot in list(shapes.values())[:EQUAL_LOTS_MAX]:
            tables = StageTimeTables(
                self.maker,
                [self.lots[lot]],
                degrees=self.degrees,
                recomputes=self.recomputes,
                per_layer_sync=self.judge.overlaps,
                typical=True,
            )
            if tables.table_size > EQUAL_TABLE_MAX:
                continue
            for line in quickest_equal_pipelines(
                self.maker,
                tables,
                lot,
                micro_batches=self.drafted,
                global_batch=self.job.global_batch,
                longest_s=longest_s,
            ):
                total = self.job.global_batch // line.template.micro_batch
                count = min(room_for(line.template, self.lots, {}), line.pipelines, total)
                if count:
                    found.append((line.seconds, PipelineMix((line.template,), (count,))))
        found.sort(key=lambda pair: pair[0])
        return [mix for _, mix in found[: int(EQUAL_MAX * self.width)]]


def family_of(mix: PipelineMix) -> object:
    """The family of a mix: its lots, TP degrees, stage counts, micro batch and placement."""
    used = {(stage.lot, stage.tp) for template in mix.templates for stage in template.stages}
    depths = {len(template.stages) for template in mix.templates}
    return mix.templates[0].micro_batch, frozenset(used), frozenset(depths), mix.together
