"""The better of two answers: without outer steps, and with them.

With them, the whole search is repeated: sums across slow zones hardly count then, so that other
plans are good, such as one group of pipelines in each zone (ADR 118).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.either_zero import bounded_by_both
from planner.problem.preference import PlanEstimate, are_tied, objective_of
from planner.problem.question import STOPPED, Answer, Gain, Question
from planner.search.search_cache import SearchCache
from simulator.spec.job import Goal
from simulator.spec.plan import Plan

STARTS_MAX = 12
"""Plans found without outer steps from which the search with them starts."""


def better_with_outer_steps(
    question: Question, ask: Callable[[Question, SearchCache], Answer], cache: SearchCache
) -> Answer:
    """Ask without outer steps and with them, and take a plan with them if it is better.

    If simple plans are preferred, only if the two can be told apart: the loss differs, too. The
    bounds are those of both spaces.
    """
    tries = tuple(name for name in question.tries if name != "outer-steps")
    goal = question.job.objective.goal
    alone = replace(question, tries=tries, outer_every=None)
    plain = ask(alone, cache)
    if len({pool.zone for pool in question.cluster.pools}) == 1:
        gain = Gain("outer-steps", goal, None, plain.objective, why_none="all GPUs are in one zone")
        return replace(plain, gains=(*plain.gains, gain))
    if plain.note == STOPPED:
        return plain
    with_steps = SearchCache(given=_starts(cache, goal))
    try:
        found = ask(replace(question, tries=tries), with_steps)
    except KeyboardInterrupt:
        if not question.is_stoppable or plain.plan is None:
            raise
        return replace(plain, note=STOPPED)
    evaluations = plain.evaluations + found.evaluations
    is_better = _is_better(question, found, plain)
    has_steps = found.plan is not None and found.plan.outer_every is not None
    if is_better and not has_steps:
        plain = found  # The second question found a better plan without them.
    is_taken = is_better and has_steps
    best = [_find_best_with_steps(with_steps, goal), found.objective if has_steps else None]
    least = min((each for each in best if each is not None), default=None)
    gain = Gain("outer-steps", goal, least, plain.objective, is_taken)
    taken = found if is_taken else plain
    answer = replace(taken, evaluations=evaluations, gains=(*taken.gains, gain))
    if plain.plan is None or found.plan is None:
        return answer  # The space in which no plan was found has no bound.
    # The second question's bounds cover both spaces, but never exceed its own best plan.
    return bounded_by_both(question, replace(answer, covered=found.covered), plain, found)


def _starts(cache: SearchCache, goal: Goal) -> tuple[Plan, ...]:
    """The best judged plans that can take outer steps."""
    judged = [PlanEstimate(*pair) for pair in cache.judged]
    ranked = sorted(judged, key=lambda one: objective_of(one, goal))
    plans = dict.fromkeys(one.plan for one in ranked)
    return tuple(plan for plan in plans if _can_take(plan))[:STARTS_MAX]


def _find_best_with_steps(cache: SearchCache, goal: Goal) -> float | None:
    """The least objective of all judged plans with outer steps."""
    judged = (PlanEstimate(*pair) for pair in cache.judged)
    figures = (objective_of(one, goal) for one in judged if one.plan.outer_every is not None)
    return min(figures, default=None)


def _can_take(plan: Plan) -> bool:
    # The search with outer steps is one without sequence parallelism.
    if plan.schedule != "1f1b" or plan.sequence_parallel:
        return False
    return plan.with_outer_steps(1) is not plan


def _is_better(question: Question, found: Answer, plain: Answer) -> bool:
    """Whether the second plan is better, beyond the error bar if simple plans are preferred."""
    if found.plan is None or found.estimate is None:
        return False
    if plain.plan is None or plain.estimate is None:
        return True
    goal = question.job.objective.goal
    one, other = PlanEstimate(found.plan, found.estimate), PlanEstimate(plain.plan, plain.estimate)
    if objective_of(one, goal) >= objective_of(other, goal):
        return False
    return question.prefer == "fastest" or not are_tied(one, other, goal)
