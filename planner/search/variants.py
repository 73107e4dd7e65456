"""Variants of judged plans: each good plan changed in one way, then the best in small steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from planner.pipelines.pipeline_mix import PipelineMix, plan_of
from planner.search.chunks import FAMILIES_MAX
from planner.search.local_search import EventSearch, JudgedPlan
from simulator.spec.plan import Plan

STEPS_SHARE = 0.2
"""Plans judged in small steps, as a share of those judged before."""

PlanChange = Callable[[Plan], Plan | None]
"""The variant of a plan; ``None``: it has none."""


def best_variant(
    search: EventSearch, starts: Iterable[JudgedPlan], change: PlanChange
) -> JudgedPlan | None:
    """Judge variants of some plans, and return the best that keeps all limits.

    They are judged on top of the budget.
    """
    end = search.evaluations + FAMILIES_MAX + int(STEPS_SHARE * search.evaluations)
    found = [_judge(search, one.plan, one.mix, change) for one in starts]
    keeping = [one for one in found if one is not None and one.keeps_limits]
    best = min(keeping, key=lambda one: one.score, default=None)
    climbed: set[PipelineMix] = set()
    better = best
    while better is not None:
        best, better = better, _better_neighbour(search, better, climbed, end, change)
    return best


def _better_neighbour(
    search: EventSearch, best: JudgedPlan, climbed: set[PipelineMix], end: int, change: PlanChange
) -> JudgedPlan | None:
    """The first small change that improves the plan, while fewer than ``end`` are judged."""
    for mix in search.neighbours(best.mix):
        total = search.job.global_batch // mix.templates[0].micro_batch
        if search.evaluations >= end:
            return None
        if mix in climbed or not 1 <= mix.pipelines <= total:
            continue
        climbed.add(mix)
        found = _judge(search, plan_of(mix, total, search.maker), mix, change)
        if found is not None and found.score < best.score:
            return found
    return None


def _judge(
    search: EventSearch, plan: Plan, mix: PipelineMix, change: PlanChange
) -> JudgedPlan | None:
    changed = change(plan)
    return None if changed is None else search.judge_plan(changed, mix)
