"""The search under the event estimator: drafts pipeline mixes, judges the best, then improves them.

Pipelines may differ in everything, so a plan is a mix of pipeline templates. Mixes are ranked by
rough times that cost microseconds; the best are judged by the estimator; the best of those are
changed in small steps while that helps and the budget allows.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from planner.pipelines.pipeline_mix import (
    PipelineMix,
    mix_of_plan,
    placements,
    plan_of,
    room_for,
)
from planner.pipelines.pipeline_template import Template, TemplateMaker
from planner.pipelines.stage_memory import TemplateStage
from planner.problem.inventory import gpus_by_lot, is_supplied, spot_share
from planner.problem.objective import LimitedFigures, Limits
from planner.problem.seeded_random import SeededRandom
from planner.search.drafts import EventDrafts, family_of
from planner.search.equal_pipelines import equal_mixes
from planner.search.exhaustive import all_bounded_mixes
from planner.search.pricing import fewest_gpus
from simulator.estimate.machine_layout import lay_out
from simulator.estimate.result import Estimate
from simulator.hardware.runtime_constants import uses_gloo
from simulator.spec.plan import Plan

EXHAUST_MAX = 1000
"""Mixes of a small case that are judged beyond the budget, each in all placements."""
JUDGED_SHARE = 0.5
"""Share of the budget for drafted mixes, which are judged first; the rest is for small changes."""
EQUAL_MAX, EQUAL_SHARE = 24, 1 / 6
"""Mixes of equal pipelines that are judged in all placements, on top of the budget; once a plan is
known, this share of the budget at most."""
STARTS_MAX = 12
"""Plans of different families that are improved in small steps."""
BREACH = 4.0
"""Penalty slope for limits that a plan breaks from which small changes start."""
NEARBY_MAX = 4
"""Most random changes between a good plan and one that is improved, with a larger budget."""
FRUITLESS_MAX = 50
"""Attempts in a row from nearby plans without a new plan, before the search ends."""
PLACED_SHARE = 0.2
"""Plans judged with other placements, as a share of those judged before."""
PLACED_DRAFTS_SHARE = 0.5
"""Of those plans, the share for the best plans and drafts in other placements; the rest is for
small changes to these."""


@dataclass(frozen=True, slots=True, eq=False)
class JudgedPlan:
    """A mix's plan with its estimate and score: lower is better, infinite if it breaks a limit."""

    score: tuple[float, ...]
    mix: PipelineMix
    plan: Plan
    estimate: Estimate

    @property
    def keeps_limits(self) -> bool:
        """Whether it keeps all limits."""
        return self.score[0] < math.inf


@dataclass(slots=True, eq=False)
class EventSearch(EventDrafts):
    """One search for one question; its inputs and drafts are inherited from ``drafts.py``."""

    budget: int
    seeds: tuple[PipelineMix, ...] = ()
    """Mixes from elsewhere that are judged first."""
    given: tuple[Plan, ...] = ()
    """Plans from elsewhere; the result is at least as good as each without split stages."""
    proves: bool = True
    """Whether a small case is searched exhaustively though a plan was found."""
    told: Callable[[int], None] = lambda _: None
    """Progress callback: the number of plans judged."""
    shares_tokens: bool = False
    """Whether the plans are judged with sequence parallelism, which ``maker`` knows of, too."""
    outer_every: int | None = None
    """Iterations between outer steps of the plans that can take them."""
    evaluations: int = 0
    is_complete: bool = False
    """Whether all plans were judged or ruled out by a bound."""
    judged: list[JudgedPlan] = field(default_factory=list)
    broken: list[JudgedPlan] = field(default_factory=list)
    """Plans that fit in memory and break a limit, ranked by how far."""
    _known: dict[PipelineMix, JudgedPlan | None] = field(default_factory=dict)

    def run(self) -> JudgedPlan | None:
        """Return the best plan found within the budget; none if no judged plan keeps all limits."""
        gpus = sum(lot.gpus for lot in self.lots)
        if fewest_gpus(self.tables, self.micro_batches, gpus) > gpus:
            self.is_complete = True
            return None
        for plan in self.given:
            mix = mix_of_plan(plan, self.maker)
            if mix is not None:
                self.judge_plan(plan, mix)
                self.judge_mix(mix)
        for mix in self.seeds:
            self.judge_mix(mix)
        drafted = max(1, int(self.budget * JUDGED_SHARE))
        mixes = list(self.mixes())
        for mix in self.best_per_family_first(self.ranked(mixes), drafted):
            if self.evaluations >= drafted:
                break
            self.judge_mix(mix)
        before = self.evaluations
        best_s = min((j.estimate.iteration_s for j in self.judged), default=None)
        longest_s = self.limits.seconds_max if self.limits.needs_prices else best_s
        equal = int(EQUAL_MAX * self.width)
        if self.judged:
            equal = min(equal, math.ceil(EQUAL_SHARE * self.budget))
        for mix in equal_mixes(self, longest_s, equal):
            self.judge_mix(mix)
        spent = self.evaluations - before
        for mix in self.single_pipelines():
            self.judge_mix(mix)
        self.climb_from(self.best_of_families, self.budget + spent)
        if self.width > 1:
            self.climb_from_nearby(self.budget + spent)
        self.place(mixes)
        return self.best_of_all(min(self.judged, key=lambda j: j.score, default=None))

    def place(self, mixes: list[PipelineMix]) -> None:
        """Judge other placements of the best plans and of drafts.

        They have a budget of their own, so other plans lose none.
        """
        more = PLACED_SHARE * self.evaluations
        drafts_end = self.evaluations + int(PLACED_DRAFTS_SHARE * more)
        end = self.evaluations + int(more)
        best = [p for j in self.best_of_families() for p in placements(j.mix, self.lots)]
        sharing = [p for mix in mixes for p in placements(mix, self.lots) if p.together == 1]
        ranked = self.best_per_family_first(self.ranked(sharing), drafts_end - self.evaluations)
        for pair in itertools.zip_longest(best, ranked):
            for mix in pair:
                if mix is not None and self.evaluations < drafts_end:
                    self.judge_mix(mix)
        self.climb_from(
            lambda: [j for j in self.best_of_families() if j.mix.together is not None], end
        )

    def climb_from(self, starts: Callable[[], list[JudgedPlan]], end: int) -> None:
        """Improve the best start, then the next, until ``end`` plans are judged."""
        climbed: set[PipelineMix] = set()
        while self.evaluations < end:
            start = next((j for j in starts() if j.mix not in climbed), None)
            if start is None:
                break
            self.climb(start, climbed, end)

    def climb_from_nearby(self, end: int) -> None:
        """Improve plans that are some random changes away from good ones, until ``end`` plans are
        judged or no new ones are met.
        """
        draws, climbed, fruitless = SeededRandom(0), set[PipelineMix](), 0
        starts = self.best_of_families()
        while starts and self.evaluations < end and fruitless < FRUITLESS_MAX:
            before = self.evaluations
            near = starts[draws.below(len(starts))]
            for _ in range(1 + draws.below(NEARBY_MAX)):
                around = list(self.neighbours(near.mix))
                found = self.judge_mix(around[draws.below(len(around))]) if around else None
                near = found or near
            self.climb(near, climbed, end)
            starts = self.best_of_families()
            fruitless = 0 if self.evaluations > before else fruitless + 1

    def climb(self, start: JudgedPlan, climbed: set[PipelineMix], end: int) -> None:
        """Change a plan in small steps while that improves it."""
        best: JudgedPlan | None = start
        while best is not None and best.mix not in climbed:
            climbed.add(best.mix)
            best = self.better_neighbour(best, end)

    def best_of_families(self) -> list[JudgedPlan]:
        """The best judged plan of each family, best first.

        A plan that nearly keeps the limits may be ranked before one that keeps them.
        """
        found: dict[object, JudgedPlan] = {}
        for judged in sorted([*self.judged, *self.broken], key=self._promise):
            found.setdefault(family_of(judged.mix), judged)
        return list(found.values())[: int(STARTS_MAX * self.width)]

    def _promise(self, judged: JudgedPlan) -> tuple[float, ...]:
        """What a plan is ranked by as a start of small changes."""
        score = judged.score
        if judged.keeps_limits:
            return (score[0], 0.0, *score[1:])
        excess = score[1]
        usd = judged.estimate.money.total_usd if self.limits.goal_is_cost else None
        least = usd or judged.estimate.iteration_s
        by_excess = least * (1 + BREACH * (excess - 1)) if math.isfinite(excess) else math.inf
        return (by_excess, 1.0, *score[1:])

    def best_of_all(self, best: JudgedPlan | None) -> JudgedPlan | None:
        """Judge all remaining plans if they are few enough, and return the best."""
        if best is not None and not self.proves:
            return best
        bounded_mixes = all_bounded_mixes(
            self.tables,
            self.job.recompute,
            self.degrees,
            self.limits,
            micro_batches=self.micro_batches,
            global_batch=self.job.global_batch,
            known=None if best is None else best.score[0],
        )
        left = EXHAUST_MAX
        for bounded in bounded_mixes or ():
            if best is not None and bounded.least > best.score[0]:
                break
            if left == 0:
                return best
            left -= 1
            templates = bounded.templates(self.tables)
            mix = PipelineMix(templates, (1,) * len(templates))
            pairs = zip(templates, bounded.counts, strict=True)
            pipelines = tuple(self.maker.pipeline(t, n, len(templates)) for t, n in pairs)
            unplaced = self.maker.fitted(Plan(bounded.micro_batch, pipelines))
            for plan in self.every_placement(unplaced):
                found = self.judge_plan(plan, replace(mix, together=plan.together))
                if found is None or not found.keeps_limits:
                    continue
                if best is None or found.score < best.score:
                    best = found
        # Gloo's rings follow the order of the pipelines, of which only one was judged.
        has_orders = sum(lot.gpus for lot in self.lots) > 2 and any(
            uses_gloo(lot.gpu) for lot in self.lots
        )
        self.is_complete = bounded_mixes is not None and not has_orders
        return best

    def every_placement(self, plan: Plan) -> Iterator[Plan]:
        """The plan, and with each other way to place its pipelines that changes their machines."""
        equal = Counter(pipeline.stages for pipeline in plan.pipelines)
        seen = set()
        for together in (None, *range(1, max(equal.values()) + 1)):
            placed = replace(plan, together=together)
            layout = lay_out(placed, self.judge.facts.machines)
            machines = layout.node.tobytes()
            if machines not in seen:
                seen.add(machines)
                yield placed

    # -- judging --------------------------------------------------------------------------------

    def judge_mix(self, mix: PipelineMix) -> JudgedPlan | None:
        """Judge a mix's plan once."""
        if mix in self._known:
            return self._known[mix]
        total = self.job.global_batch // mix.templates[0].micro_batch
        if not 1 <= mix.pipelines <= total:
            return None
        found = self.judge_plan(plan_of(mix, total, self.maker), mix)
        self._known[mix] = found
        return found

    def judge_plan(self, plan: Plan, mix: PipelineMix) -> JudgedPlan | None:
        """Judge one plan; ``None`` if the GPUs cannot hold it."""
        if self.shares_tokens:
            plan = replace(plan, sequence_parallel=True)
        if self.outer_every is not None:
            plan = plan.with_outer_steps(self.outer_every)
        if not is_supplied(plan, self.lots, self.grants):
            return None
        self.evaluations += 1
        self.told(self.evaluations)
        estimate = self.judge.estimate(plan)
        if not estimate.fits:
            return None
        figures = self.figures(plan, estimate)
        score = self.limits.score(figures)
        if score is None:
            breaches = self.limits.breaches(figures)
            excess = max((breach.excess for breach in breaches), default=math.inf)
            found = JudgedPlan((math.inf, excess, mix.pipelines), mix, plan, estimate)
            self.broken.append(found)
        else:
            found = JudgedPlan((*score, mix.pipelines), mix, plan, estimate)
            self.judged.append(found)
        return found

    def keeping(self, limits: Limits) -> list[JudgedPlan]:
        """The judged plans that keep other limits, with their score under them."""
        scores = ((j, limits.score(self.figures(j.plan, j.estimate))) for j in self.judged)
        return [replace(judged, score=score) for judged, score in scores if score is not None]

    def figures(self, plan: Plan, estimate: Estimate) -> LimitedFigures:
        """The figures of a plan that limits apply to."""
        share = spot_share(gpus_by_lot(plan, self.lots), self.lots)
        return LimitedFigures(estimate.iteration_s, estimate.money.total_usd, share)

    # -- small changes --------------------------------------------------------------------------

    def better_neighbour(self, best: JudgedPlan, end: int) -> JudgedPlan | None:
        """The first small change that improves the plan, while fewer than ``end`` are judged.

        If the plan is too dear, changes that save GPUs come first, those that save few before all.
        """
        around: Iterable[PipelineMix] = self.neighbours(best.mix)
        if self.limits.needs_prices and not best.keeps_limits:
            gpus = best.mix.gpus
            around = sorted(around, key=lambda mix: (mix.gpus >= gpus, -mix.gpus))
        for mix in around:
            if self.evaluations >= end:
                return None
            found = self.judge_mix(mix)
            if found is not None and found.score < best.score:
                return found
        return None

    def neighbours(self, mix: PipelineMix) -> Iterator[PipelineMix]:
        """Mixes that differ in one thing."""
        if mix.together is not None:
            yield from placements(mix, self.lots)
        b = mix.templates[0].micro_batch
        total = self.job.global_batch // b
        for index, template in enumerate(mix.templates):
            for changed in self.variants(template, total, self.maker_for(mix)):
                yield self._change_template(mix, index, changed, total)
        for index, count in enumerate(mix.counts):
            for changed_count in (count - 1, count + 1):
                if changed_count or len(mix.counts) > 1:
                    yield mix.with_count(index, changed_count)
        yield from self._list_smaller(mix, total)
        yield from self.other_micro_batches(mix)
        for lot in range(len(self.lots)):
            for template in self.templates((lot,), b, total):
                if template in mix.templates:
                    continue
                room = room_for(template, self.lots, mix.groups(), self.grants)
                count = min(room, total - mix.pipelines)
                if count > 0:
                    more = (*mix.templates, template), (*mix.counts, count)
                    yield PipelineMix(*more, mix.together)

    def other_micro_batches(self, mix: PipelineMix) -> Iterator[PipelineMix]:
        """The same stages with the next smaller and the next larger micro batch."""
        b = mix.templates[0].micro_batch
        near = [size for size in self.micro_batches if size < b][-1:]
        near += [size for size in self.micro_batches if size > b][:1]
        for size in near:
            total = self.job.global_batch // size
            maker = self.maker_for(mix)
            made = [maker.template(each.stages, size, total) for each in mix.templates]
            templates = tuple(each for each in made if each is not None)
            if len(templates) == len(made) and mix.pipelines <= total:
                yield replace(mix, templates=templates)

    def maker_for(self, mix: PipelineMix) -> TemplateMaker:
        """Return the maker of the templates of mixes like this one."""
        return self.alone if mix.pipelines == 1 else self.maker

    def variants(self, template: Template, total: int, maker: TemplateMaker) -> Iterator[Template]:
        """Templates with one boundary, TP degree, stage or lot changed."""
        b, cuts, stages = template.micro_batch, template.cuts, template.stages
        for s in range(1, len(stages)):
            for step in (-1, 1):
                moved = (*cuts[:s], cuts[s] + step, *cuts[s + 1 :])
                if moved[s - 1] < moved[s] < moved[s + 1]:
                    yield maker.timed(stages, b, moved)
        for s, one in enumerate(stages):
            near = [tp for tp in self.degrees if tp < one.tp][-1:]
            near += [tp for tp in self.degrees if tp > one.tp][:1]
            if one.recompute == "auto":
                # The layers as they would be if this stage took longer.
                slower = (*stages[:s], replace(one, recompute="full"), *stages[s + 1 :])
                lighter = maker.template(slower, b, total)
                if lighter is not None and lighter.cuts != cuts:
                    yield maker.timed(stages, b, lighter.cuts)
            for other in (replace(one, tp=tp) for tp in near):
                if self.lots[other.lot].room(other.tp):
                    changed = (*stages[:s], other, *stages[s + 1 :])
                    yield maker.timed(changed, b, cuts)
                    balanced = maker.template(changed, b, total)
                    if balanced is not None and balanced.cuts != cuts:
                        yield balanced
        for others in self.other_stages(stages):
            fitted = maker.template(others, b, total)
            if fitted is not None:
                yield fitted

    def other_stages(
        self, stages: tuple[TemplateStage, ...]
    ) -> Iterator[tuple[TemplateStage, ...]]:
        """Sequences with one stage less, one more, or one on another lot; each once."""
        seen = {stages}
        for s, one in enumerate(stages):
            moved = (
                replace(one, lot=index)
                for index, lot in enumerate(self.lots)
                if index != one.lot and lot.room(one.tp)
            )
            less, more = (*stages[:s], *stages[s + 1 :]), (*stages[: s + 1], *stages[s:])
            others = ((*stages[:s], other, *stages[s + 1 :]) for other in moved)
            for found in (less, more, *others):
                if found and found not in seen:
                    seen.add(found)
                    yield found

    def _change_template(
        self, mix: PipelineMix, index: int, template: Template, total: int
    ) -> PipelineMix:
        """The mix with one template changed, and as many pipelines of it as fit.

        Where dollars count, no more than before. Without that template if the new one is in the mix
        already or has no room.
        """
        others = mix.with_count(index, 0)
        room = room_for(template, self.lots, others.groups(), self.grants)
        room = min(room, total - others.pipelines)
        if self.limits.needs_prices:
            room = min(room, mix.counts[index])
        if template in others.templates or room <= 0:
            return others if others.templates else mix
        return PipelineMix(
            (*mix.templates[:index], template, *mix.templates[index + 1 :]),
            (*mix.counts[:index], room, *mix.counts[index + 1 :]),
            mix.together,
        )
