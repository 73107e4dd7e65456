"""Zero-bubble variants of judged plans: the same stages with divided backwards.

The gradients of weights fill the wait at the end of an iteration, and what they need is kept longer
(``simulator.estimate.pass_order``). So plans with few micro batches and room in memory gain. The
best variant is then changed in small steps: without the wait, deeper pipelines may be better.
"""

from __future__ import annotations

from dataclasses import replace

from planner.pipelines.pipeline_mix import PipelineMix, plan_of
from planner.search.chunks import FAMILIES_MAX, waiting_families
from planner.search.local_search import EventSearch, JudgedPlan
from simulator.spec.plan import Plan

STEPS_SHARE = 0.2
"""Plans judged in small steps, as a share of those judged before."""


def best_without_bubble(search: EventSearch) -> JudgedPlan | None:
    """Judge zero-bubble variants of good plans, and return the best that keeps all limits.

    They are judged on top of the budget. Where no plan keeps the limits, variants of those that
    break them least are judged.
    """
    end = search.evaluations + FAMILIES_MAX + int(STEPS_SHARE * search.evaluations)
    starts = waiting_families(search, lambda plan: plan.schedule == "1f1b")
    found = [search.judge_plan(divided(one.plan), one.mix) for one in starts]
    keeping = [one for one in found if one is not None and one.keeps_limits]
    best = min(keeping, key=lambda one: one.score, default=None)
    climbed: set[PipelineMix] = set()
    better = best
    while better is not None:
        best, better = better, _better_neighbour(search, better, climbed, end)
    return best


def divided(plan: Plan) -> Plan:
    """The plan with divided backwards."""
    return replace(plan, schedule="zero-bubble")


def _better_neighbour(
    search: EventSearch, best: JudgedPlan, climbed: set[PipelineMix], end: int
) -> JudgedPlan | None:
    """The first small change that improves the plan, while fewer than ``end`` are judged."""
    for mix in search.neighbours(best.mix):
        total = search.job.global_batch // mix.templates[0].micro_batch
        if search.evaluations >= end:
            return None
        if mix in climbed or not 1 <= mix.pipelines <= total:
            continue
        climbed.add(mix)
        found = search.judge_plan(divided(plan_of(mix, total, search.maker)), mix)
        if found is not None and found.score < best.score:
            return found
    return None
