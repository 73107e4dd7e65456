"""Candidate pipeline mixes after a change: the survivors, and new pipelines from spare GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.pipelines.pipeline_mix import PipelineMix, room_for, take
from planner.pipelines.pipeline_template import Template, TemplateMaker
from planner.pipelines.stage_memory import TemplateStage
from planner.problem.inventory import Lot
from planner.replan.damage import BrokenPipeline
from planner.search.local_search import EventSearch

PURE_PER_LOT = 2
MIXED_PER_PAIR = 2
FILLERS_MAX = 12
FILL_WITH = 4


@dataclass(frozen=True, slots=True, eq=False)
class RepairDrafts:
    """Drafts mixes for the GPUs that are up, starting from the running ones."""

    templates: EventSearch
    """Good templates for every lot, regardless of what is up."""
    lots: tuple[Lot, ...]
    total: int
    """Micro batches of an iteration."""
    micro_batch: int

    def around(self, base: PipelineMix, broken: Sequence[BrokenPipeline]) -> Iterator[PipelineMix]:
        """Mixes that keep most of the running pipelines, in no order."""
        running = (*base.templates, *(one.template for one in broken))
        near = {stage.lot for template in running for stage in template.stages}
        spare = self._fitting(base, [*self._repair(base, broken), *self._list_known(base, broken)])
        yield from self._refill(base, spare, near)
        if not base.templates:
            # A single pipeline sets no memory aside for sums of gradients.
            for template in self._fitting(base, self._repair(base, broken, is_alone=True)):
                yield PipelineMix((template,), (1,), base.together)
        for index, (given_up, count) in enumerate(base.pairs):
            # One pipeline less: cheaper by itself, or making room for others.
            fewer = base.with_count(index, count - 1)
            if not fewer.templates:
                continue
            yield fewer
            others = self._list_known(fewer, broken)
            spare = [t for t in self._fitting(fewer, others) if t != given_up]
            yield from self._refill(fewer, spare[:FILL_WITH], near)

    def _refill(
        self, base: PipelineMix, spare: Sequence[Template], lots: Collection[int]
    ) -> Iterator[PipelineMix]:
        """More of one template; then also of others on these lots; then of any."""
        near = [t for t in spare if all(stage.lot in lots for stage in t.stages)]
        for first in spare:
            yield self.filled(base, [first])
            if first in near:
                yield self.filled(base, [first, *near[:FILL_WITH]])
        for first in spare[:FILL_WITH]:
            yield self.filled(base, [first, *spare[:FILL_WITH]])

    def filled(self, base: PipelineMix, templates: Iterable[Template]) -> PipelineMix:
        """The mix with as many more pipelines of each template as fit, in this order."""
        counts = dict(base.pairs)
        left, taken = self.total - base.pipelines, base.groups()
        spare = self._spare(base)
        for template in templates:
            if not _may_fit(template, spare):
                continue
            more = min(room_for(template, self.lots, taken), left)
            if more <= 0:
                continue
            left -= more
            counts[template] = counts.get(template, 0) + more
            take(taken, template, more)
            for (lot, tp), groups in template.gpus.items():
                spare[lot] -= tp * groups * more
        return PipelineMix(tuple(counts), tuple(counts.values()), base.together)

    def _spare(self, base: PipelineMix) -> list[int]:
        """GPUs by lot that the mix does not use."""
        spare = [lot.gpus for lot in self.lots]
        for lot, groups in base.groups().items():
            spare[lot] -= sum(tp * count for tp, count in groups.items())
        return spare

    def _fitting(self, base: PipelineMix, templates: Iterable[Template]) -> list[Template]:
        """The templates that fit at least once beside the mix, without duplicates."""
        taken, spare = base.groups(), self._spare(base)
        found: dict[Template, None] = {}
        for template in templates:
            if len(found) >= FILLERS_MAX:
                break
            fits = template not in found and _may_fit(template, spare)
            if fits and room_for(template, self.lots, taken) > 0:
                found[template] = None
        return list(found)

    def _list_known(
        self, base: PipelineMix, broken: Sequence[BrokenPipeline]
    ) -> Iterator[Template]:
        """Templates that ran before, then good templates on lots with spare GPUs."""
        yield from (one.template for one in broken)
        yield from base.templates
        spare = self._spare(base)
        some = [k for k in sorted(range(len(spare)), key=lambda k: (-spare[k], k)) if spare[k] > 0]
        for lot in some:
            yield from self.templates.templates((lot,), self.micro_batch, self.total)[:PURE_PER_LOT]
        for pair in template_lots(self.lots):
            if len(pair) == 2 and all(spare[lot] > 0 for lot in pair):
                mixed = self.templates.templates(pair, self.micro_batch, self.total)
                yield from mixed[:MIXED_PER_PAIR]

    def _repair(
        self, base: PipelineMix, broken: Sequence[BrokenPipeline], *, is_alone: bool = False
    ) -> Iterator[Template]:
        """Broken pipelines without their lost stages, or with other GPUs in their place."""
        maker = self.templates.alone if is_alone else self.templates.maker
        for one in dict.fromkeys(broken):
            template = one.template
            lost = set(one.lost_stages)
            kept = tuple(stage for s, stage in enumerate(template.stages) if s not in lost)
            if kept:
                fewer = maker.template(kept, self.micro_batch, self.total)
                if fewer is not None:
                    yield fewer
            spare = self._spare(base)
            for s, stage in enumerate(template.stages):
                if s not in lost:
                    spare[stage.lot] -= stage.tp
            for other in self._replacements(template.stages[one.lost_stages[0]], spare):
                stages = tuple(
                    other if s in lost else stage for s, stage in enumerate(template.stages)
                )
                if self._fits_memory(maker, stages, template.cuts):
                    yield maker.timed(stages, self.micro_batch, template.cuts)
                balanced = maker.template(stages, self.micro_batch, self.total)
                if balanced is not None:
                    yield balanced

    def _fits_memory(
        self, maker: TemplateMaker, stages: Sequence[TemplateStage], cuts: Sequence[int]
    ) -> bool:
        """Whether stages with these boundaries fit their devices."""
        b = self.micro_batch
        return all(
            maker.memory.most_in_flight(stage, b, maker.pipelines)[cuts[s], cuts[s + 1]]
            >= min(self.total, len(stages) - s)
            for s, stage in enumerate(stages)
        )

    def _replacements(self, stage: TemplateStage, spare: Sequence[int]) -> Iterator[TemplateStage]:
        """Stages that could replace a lost one, with at most its TP degree where possible."""
        for lot in sorted(range(len(spare)), key=lambda k: (-spare[k], k)):
            degrees = [tp for tp in self.templates.degrees if tp <= spare[lot]]
            near = [tp for tp in degrees if tp <= stage.tp] or degrees[:1]
            if near and self.lots[lot].room(near[-1]):
                yield replace(stage, lot=lot, tp=near[-1])


def template_lots(lots: Sequence[Lot]) -> list[tuple[int, ...]]:
    """Lot sets to make templates for: each lot alone, and pairs of kinds in one zone."""
    pairs = itertools.combinations(range(len(lots)), 2)
    near = [(a, b) for a, b in pairs if lots[a].zone == lots[b].zone]
    return [*((lot,) for lot in range(len(lots))), *near]


def _may_fit(template: Template, spare: Sequence[int]) -> bool:
    """Whether there are enough GPUs, regardless of their machines."""
    needs: dict[int, int] = {}
    for stage in template.stages:
        needs[stage.lot] = needs.get(stage.lot, 0) + stage.tp
    return all(count <= spare[lot] for lot, count in needs.items())
