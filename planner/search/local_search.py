"""The search under an estimator that judges whole plans: fleets of templates, then small changes.

Pipelines may differ in everything, so a plan is a fleet: some pipelines of this template, some
of that. Fleets are ranked by rough times that cost microseconds, the best are judged in full,
and the best of those is changed a little for as long as that helps and the budget allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from planner.pipelines.pipeline_mix import Fleet, fleet_of_plan, plan_of, room_for
from planner.pipelines.pipeline_template import Template
from planner.problem.inventory import is_supplied
from planner.problem.objective import Figures, Limits
from planner.search.drafts import EventDrafts, family_of
from planner.search.exhaustive import every_deal
from planner.search.smallest import fewest_gpus
from simulator.estimate.result import Estimate
from simulator.spec.job import Job
from simulator.spec.plan import Plan

EXHAUST_MAX = 1000
"""Plans of a small case that are judged beyond the budget."""
JUDGED_SHARE = 0.5
"""Of the budget, for fleets as they were drafted; the rest is for changes to the best."""
STARTS_MAX = 12
"""Plans of different families that are changed for as long as that helps."""


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A fleet's plan with its estimate and worth, which is infinite if it breaks a limit."""

    worth: tuple[float, ...]
    fleet: Fleet
    plan: Plan
    estimate: Estimate

    @property
    def keeps_limits(self) -> bool:
        return self.worth[0] < math.inf


@dataclass(slots=True, eq=False)
class EventSearch(EventDrafts):
    """One search; it holds what its steps share."""

    budget: int
    seeds: tuple[Fleet, ...] = ()
    """Fleets from elsewhere, to be judged first."""
    given: tuple[Plan, ...] = ()
    """Plans from elsewhere: what is found is no worse than any of them."""
    proves: bool = True
    """Whether all plans are looked at where they are few."""
    evaluations: int = 0
    is_complete: bool = False
    """Whether all plans were looked at, or bounded."""
    judged: list[Judged] = field(default_factory=list)
    broken: list[Judged] = field(default_factory=list)
    """Plans that fit and break a limit, worth the less the further they are from keeping it."""
    _known: dict[Fleet, Judged | None] = field(default_factory=dict)

    def run(self) -> Judged | None:
        """The best plan that the budget allows to find."""
        gpus = sum(lot.gpus for lot in self.lots)
        if fewest_gpus(self.floors, self.micro_batches, gpus) > gpus:
            self.is_complete = True
            return None
        for plan in self.given:
            fleet = fleet_of_plan(plan, self.maker)
            if fleet is not None:
                self.judge_plan(plan, fleet)
                self.look_at(fleet)
        for fleet in self.seeds:
            self.look_at(fleet)
        drafted = max(1, int(self.budget * JUDGED_SHARE))
        for fleet in self.byfamily_of(self.ranked(), drafted):
            if self.evaluations >= drafted:
                break
            self.look_at(fleet)
        longest_s = min((j.estimate.iteration_s for j in self.judged), default=None)
        if longest_s is None or not self.limits.needs_prices:
            for fleet in self.lines(longest_s):
                self.look_at(fleet)
        climbed: set[Fleet] = set()
        while self.evaluations < self.budget:
            start = next((j for j in self.best_of_families() if j.fleet not in climbed), None)
            if start is None:
                break
            self.climb(start, climbed)
        return self.finished(min(self.judged, key=lambda j: j.worth, default=None))

    def climb(self, start: Judged, climbed: set[Fleet]) -> None:
        """Change a plan a little for as long as that helps."""
        best: Judged | None = start
        while best is not None and best.fleet not in climbed:
            climbed.add(best.fleet)
            best = self.better_neighbour(best)

    def best_of_families(self) -> list[Judged]:
        """The best judged plan of each family, best first; those that keep limits, if any do."""
        found: dict[object, Judged] = {}
        for judged in sorted(self.judged or self.broken, key=lambda j: j.worth):
            found.setdefault(family_of(judged.fleet), judged)
        return list(found.values())[:STARTS_MAX]

    def finished(self, best: Judged | None) -> Judged | None:
        """The best of all plans, where there are so few that all can be looked at."""
        if best is not None and not self.proves:
            return best
        deals = every_deal(
            self.floors,
            self.recomputes,
            self.degrees,
            self.limits,
            micro_batches=self.micro_batches,
            global_batch=self.job.global_batch,
            known=None if best is None else best.worth[0],
        )
        left = EXHAUST_MAX
        for deal in deals or ():
            if best is not None and deal.least > best.worth[0]:
                break
            if left == 0:
                return best
            left -= 1
            templates = deal.templates(self.floors)
            fleet = Fleet(templates, (1,) * len(templates))
            pairs = zip(templates, deal.counts, strict=True)
            found = self.judge_plan(
                Plan(deal.micro_batch, tuple(t.pipeline(n, self.lots) for t, n in pairs)), fleet
            )
            if found is None or not found.keeps_limits:
                continue
            if best is None or found.worth < best.worth:
                best = found
        self.is_complete = deals is not None
        return best

    # -- judging --------------------------------------------------------------------------------

    def look_at(self, fleet: Fleet) -> Judged | None:
        """Judge a fleet in full, once."""
        if fleet in self._known:
            return self._known[fleet]
        total = self.job.global_batch // fleet.templates[0].micro_batch
        if not 1 <= fleet.pipelines <= total:
            return None
        found = self.judge_plan(plan_of(fleet, total, self.lots), fleet)
        self._known[fleet] = found
        return found

    def judge_plan(self, plan: Plan, fleet: Fleet) -> Judged | None:
        """Judge one plan; none where the GPUs cannot hold it."""
        if not is_supplied(plan, self.lots, self.grants):
            return None
        self.evaluations += 1
        estimate = self.judge.estimate(plan)
        if not estimate.fits:
            return None
        figures = self.figures(plan, estimate)
        worth = self.limits.worth(figures)
        if worth is None:
            excess = max(breach.excess for breach in self.limits.breaches(figures))
            found = Judged((math.inf, excess, fleet.pipelines), fleet, plan, estimate)
            self.broken.append(found)
        else:
            found = Judged((*worth, fleet.pipelines), fleet, plan, estimate)
            self.judged.append(found)
        return found

    def keeping(self, limits: Limits) -> list[Judged]:
        """The judged plans that keep other limits, with their worth by them."""
        found = []
        for judged in self.judged:
            worth = limits.worth(self.figures(judged.plan, judged.estimate))
            if worth is not None:
                found.append(replace(judged, worth=worth))
        return found

    def figures(self, plan: Plan, estimate: Estimate) -> Figures:
        return Figures(estimate.iteration_s, estimate.money.total_usd, self.spot_share(plan))

    def spot_share(self, plan: Plan) -> float:
        used: dict[int, int] = {}
        index = {lot.place: k for k, lot in enumerate(self.lots)}
        for pipeline in plan.pipelines:
            for stage in pipeline.stages:
                lot = index[stage.place]
                used[lot] = used.get(lot, 0) + stage.tp
        spot = sum(
            max(0, n - (self.lots[k].gpus - self.lots[k].spot_gpus)) for k, n in used.items()
        )
        return spot / sum(used.values())

    # -- small changes --------------------------------------------------------------------------

    def better_neighbour(self, best: Judged) -> Judged | None:
        """The first change that helps."""
        for fleet in self.neighbours(best.fleet):
            if self.evaluations >= self.budget:
                return None
            found = self.look_at(fleet)
            if found is not None and found.worth < best.worth:
                return found
        return None

    def neighbours(self, fleet: Fleet) -> Iterator[Fleet]:
        """Fleets that differ in one thing."""
        b = fleet.templates[0].micro_batch
        total = self.job.global_batch // b
        for index, template in enumerate(fleet.templates):
            for changed in self.variants(template, total):
                yield self._with(fleet, index, changed, total)
        for index, count in enumerate(fleet.counts):
            for step in (-1, 1):
                counts = (*fleet.counts[:index], count + step, *fleet.counts[index + 1 :])
                if counts[index]:
                    yield replace(fleet, counts=counts)
                elif len(counts) > 1:
                    yield Fleet(
                        fleet.templates[:index] + fleet.templates[index + 1 :],
                        counts[:index] + counts[index + 1 :],
                    )
        yield from self._smaller(fleet, total)
        for lot in range(len(self.lots)):
            for template in self.templates((lot,), b, total):
                if template in fleet.templates:
                    continue
                room = room_for(template, self.lots, fleet.groups())
                count = min(room, total - fleet.pipelines)
                if count > 0:
                    yield Fleet((*fleet.templates, template), (*fleet.counts, count))

    def variants(self, template: Template, total: int) -> Iterator[Template]:
        """Templates with one boundary, degree or recomputation changed."""
        b, cuts, steps = template.micro_batch, template.cuts, template.steps
        for s in range(1, len(steps)):
            for step in (-1, 1):
                moved = (*cuts[:s], cuts[s] + step, *cuts[s + 1 :])
                if moved[s - 1] < moved[s] < moved[s + 1]:
                    yield self.maker.timed(steps, b, moved)
        for s, one in enumerate(steps):
            near = [tp for tp in self.degrees if tp < one.tp][-1:]
            near += [tp for tp in self.degrees if tp > one.tp][:1]
            others = [replace(one, tp=tp) for tp in near]
            others += [replace(one, recompute=r) for r in self.recomputes if r != one.recompute]
            for other in others:
                if self.lots[other.lot].room(other.tp):
                    changed = (*steps[:s], other, *steps[s + 1 :])
                    yield self.maker.timed(changed, b, cuts)
                    balanced = self.maker.template(changed, b, total)
                    if balanced is not None and balanced.cuts != cuts:
                        yield balanced
        if len(set(steps)) == 1:
            for count in (len(steps) - 1, len(steps) + 1):
                if count:
                    other_size = self.maker.template((steps[0],) * count, b, total)
                    if other_size is not None:
                        yield other_size

    def _with(self, fleet: Fleet, index: int, template: Template, total: int) -> Fleet:
        """The fleet with one template changed, and as many pipelines of it as fit."""
        templates = list(fleet.templates)
        counts = list(fleet.counts)
        others = Fleet(
            tuple(templates[:index] + templates[index + 1 :]),
            tuple(counts[:index] + counts[index + 1 :]),
        )
        taken = others.groups() if others.templates else {}
        room = min(room_for(template, self.lots, taken), total - others.pipelines)
        if template in others.templates or room <= 0:
            return others if others.templates else fleet
        templates[index], counts[index] = template, room
        return Fleet(tuple(templates), tuple(counts))


def micro_batch_sizes(job: Job, most: int = 64) -> tuple[int, ...]:
    """The sizes to consider: what the job allows, else all divisors of its batch up to some."""
    sizes: Sequence[int] = job.micro_batches or range(1, most + 1)
    return tuple(b for b in sizes if job.global_batch % b == 0)
