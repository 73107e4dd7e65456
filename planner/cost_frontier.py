"""The cost frontier: plans that no other plan beats in both speed and cost.

Its ends are the best plans for the goals throughput and cost. Between them the search is asked for
the fastest plan within a cost, and for the cheapest plan within a time; every plan judged on the
way counts as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from planner.api import asked_with_spot_first, find_plan
from planner.problem.question import Question
from planner.search.search_cache import SearchCache
from simulator.estimate.result import Estimate
from simulator.spec.job import Goal
from simulator.spec.plan import Plan

DEFAULT_POINTS = 12


@dataclass(frozen=True, slots=True)
class FrontierPlan:
    """A plan on the frontier."""

    plan: Plan
    estimate: Estimate

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        return self.estimate.iteration_s

    @property
    def usd(self) -> float:
        """Dollars of an iteration."""
        usd = self.estimate.money.total_usd
        assert usd is not None, "a goal in dollars refuses unknown prices"
        return usd

    @property
    def usd_per_hour(self) -> float:
        """Dollars of an hour of training."""
        return self.usd / self.seconds * 3600


@dataclass(frozen=True, slots=True)
class Frontier:
    """The frontier, fastest plan first."""

    points: tuple[FrontierPlan, ...]
    found: int
    """Plans on the frontier before it was thinned."""
    judged: int
    """Plans judged in all."""


def frontier(question: Question, *, points: int = DEFAULT_POINTS) -> Frontier:
    """Find the frontier and keep up to ``points`` plans; empty if no plan keeps the limits."""
    tables = SearchCache()
    known: list[FrontierPlan] = []

    def ask(goal: Goal, **limits: float) -> None:
        objective = replace(question.job.objective, goal=goal, **limits)  # type: ignore[arg-type]  # names of limits
        job = replace(question.job, objective=objective)
        answer = find_plan(replace(question, job=job, is_bounded=False), tables)
        if answer.plan is not None:
            assert answer.estimate is not None
            known.append(FrontierPlan(answer.plan, answer.estimate))

    ask("throughput")
    ask("cost")
    other = None if known else asked_with_spot_first(question)
    if other is not None:
        return frontier(other, points=points)
    ends = pareto_front(known)
    if len(ends) > 1:
        # Both ends keep the job's limits, and so does every plan between them.
        for share in _shares(points):
            usd = _interpolate(ends[0].usd, ends[-1].usd, share)
            seconds = _interpolate(ends[0].seconds, ends[-1].seconds, share)
            ask("throughput", max_usd_per_iteration=usd)
            ask("cost", min_iterations_per_s=1 / seconds)
    known += [FrontierPlan(plan, estimate) for plan, estimate in tables.judged]
    front = pareto_front(known)
    return Frontier(thinned(front, points), len(front), len(known))


def pareto_front(points: Iterable[FrontierPlan]) -> tuple[FrontierPlan, ...]:
    """The points that no other beats in both figures, fastest first; the first of equal ones."""
    front: list[FrontierPlan] = []
    for point in sorted(points, key=lambda point: (point.seconds, point.usd)):
        if not front or point.usd < front[-1].usd:
            front.append(point)
    return tuple(front)


def thinned(front: tuple[FrontierPlan, ...], most: int) -> tuple[FrontierPlan, ...]:
    """Both ends, and between them points spread evenly along the frontier."""
    if len(front) <= most:
        return front
    first, last = front[0], front[-1]
    along = [
        math.log(point.seconds / first.seconds) / math.log(last.seconds / first.seconds)
        + (first.usd - point.usd) / (first.usd - last.usd)
        for point in front
    ]
    inner = range(1, len(front) - 1)
    kept = {0, len(front) - 1}
    for step in range(1, most - 1):
        goal = 2 * step / (most - 1)
        left = [number for number in inner if number not in kept]
        kept.add(min(left, key=lambda number: abs(along[number] - goal)))
    return tuple(front[number] for number in sorted(kept))


def _shares(points: int) -> list[float]:
    """Positions between the ends to search at; each is searched for both goals."""
    pairs = (points - 1) // 2
    return [(number + 1) / (pairs + 1) for number in range(pairs)]


def _interpolate(one: float, other: float, share: float) -> float:
    """Interpolate by ratio, so that equal shares save equal percentages."""
    if min(one, other) <= 0:
        return one + (other - one) * share
    return math.exp(math.log(one) * (1 - share) + math.log(other) * share)
