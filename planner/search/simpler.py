"""Simpler and cheaper variants of the best plan, and the choice among plans that are tied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from planner.pipelines.pipeline_mix import PipelineMix, room_for, take
from planner.pipelines.pipeline_template import Template
from planner.problem.preference import preferred
from planner.search.local_search import EventSearch, JudgedPlan
from simulator.spec.plan import equal_cuts

SIMPLER_SHARE = 0.2
"""Plans judged to find simpler ones, as a share of those judged before."""


def simpler_or_cheaper(search: EventSearch, best: JudgedPlan) -> JudgedPlan:
    """The plan to take among those that cannot be told apart from the best of a search."""
    goal = search.limits.objective.goal
    end = search.evaluations + int(SIMPLER_SHARE * search.evaluations)
    chosen = preferred(best, search.judged, goal)
    for start in dict.fromkeys((best.mix, chosen.mix)):
        # Variants of mixes with several sizes are left to ``size_variants``.
        variants = dict.fromkeys(mix for mix in Variants(search, start).mixes() if mix.has_one_size)
        for mix in search.ranked(list(variants)):
            if search.evaluations >= end:
                break
            search.judge_mix(mix)
        chosen = preferred(best, search.judged, goal)
    return chosen


@dataclass(frozen=True, slots=True, eq=False)
class Variants:
    """Mixes that are simpler or cheaper than one."""

    search: EventSearch
    mix: PipelineMix

    def mixes(self) -> Iterator[PipelineMix]:
        """The mix with one template alone; without one of its kinds or zones; on another lot; with
        equal TP degrees or layers; with one pipeline less.
        """
        for change in self._changes():
            changed = self._change(change)
            if changed is not None and changed != self.mix:
                yield changed
        for index, count in enumerate(self.mix.counts):
            if self.mix.pipelines > 1:
                yield self.mix.with_count(index, count - 1)

    def _changes(self) -> Iterator[Callable[[Template], Template | None]]:
        """Functions that change a template, or return ``None`` to leave it out."""
        lots, stages = self.search.lots, [s for t in self.mix.templates for s in t.stages]
        used = sorted({stage.lot for stage in stages})
        for template in self.mix.templates:
            yield partial(self._keep_alone, template)
        for names in ([lot.gpu for lot in lots], [lot.zone for lot in lots]):
            for name in sorted({names[k] for k in used}):
                yield partial(self._leave_out, {k for k in used if names[k] == name})
        for here in used:
            for there in range(len(lots)):
                if there != here:
                    yield partial(self._move, here, there)
        for tp in sorted({stage.tp for stage in stages}):
            yield partial(self._set_tp, tp)
        yield self._even_out

    def _change(self, change: Callable[[Template], Template | None]) -> PipelineMix | None:
        """The mix with its templates changed, and no more pipelines than there were."""
        counts: Counter[Template] = Counter()
        taken: dict[int, dict[int, int]] = {}
        for template, count in self.mix.pairs:
            other = change(template)
            if other is None:
                continue
            room = room_for(other, self.search.lots, taken, self.search.grants)
            fits = min(count, room)
            if fits > 0:
                counts[other] += fits
                take(taken, other, fits)
        if not counts:
            return None
        return PipelineMix(tuple(counts), tuple(counts.values()), self.mix.together)

    def _keep_alone(self, only: Template, template: Template) -> Template | None:
        return template if template == only else None

    def _leave_out(self, lots: set[int], template: Template) -> Template | None:
        return None if any(stage.lot in lots for stage in template.stages) else template

    def _move(self, here: int, there: int, template: Template) -> Template | None:
        if all(stage.lot != here for stage in template.stages):
            return template
        stages = (replace(s, lot=there) if s.lot == here else s for s in template.stages)
        return self._balance(replace(template, stages=tuple(stages)))

    def _set_tp(self, tp: int, template: Template) -> Template | None:
        if all(stage.tp == tp for stage in template.stages):
            return template
        return self._balance(
            replace(template, stages=tuple(replace(stage, tp=tp) for stage in template.stages))
        )

    def _balance(self, template: Template) -> Template | None:
        total = self.search.job.global_batch // template.micro_batch
        maker = self.search.maker_for(self.mix)
        return maker.template(template.stages, template.micro_batch, total)

    def _even_out(self, template: Template) -> Template | None:
        """The same stages with as many blocks each; embedding and head are no blocks."""
        maker = self.search.maker_for(self.mix)
        layers, stages = maker.costs.layer_count, template.stages
        if layers - 2 < len(stages):
            return None
        inner = (1 + cut for cut in equal_cuts(layers - 2, len(stages))[1:-1])
        return maker.timed(stages, template.micro_batch, (0, *inner, layers))
