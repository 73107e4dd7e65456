"""Which of the plans that cannot be told apart is taken: the cheaper, then the simpler.

A predicted difference inside its error bar is still the best guess of the true one, so only a few
percent of the objective are ever given away (ADR 98).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import le
from typing import Protocol, TypeVar

from simulator.estimate.difference import REPEATED, are_told_apart, difference_error
from simulator.estimate.result import Estimate
from simulator.spec.job import Goal
from simulator.spec.plan import Plan

GIVEN_AWAY_MAX = 0.05
"""Share of the objective that is given away at most."""
TIME_WEIGHT = 2
"""A plan that takes 1 % longer has to save this many percent of the dollars."""
SIMPLICITY = ("stages", "GPU kinds", "zones", "TP degrees")
"""What is counted, most important first; then come uneven layers, divided backwards,
another ZeRO stage than the job's, outer steps, and offload."""


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """A plan with its estimate, and nothing else."""

    plan: Plan
    estimate: Estimate


class Estimated(Protocol):
    """A plan with its estimate."""

    @property
    def plan(self) -> Plan: ...

    @property
    def estimate(self) -> Estimate: ...


_Plan = TypeVar("_Plan", bound=Estimated)


def error_between(one: Estimated, other: Estimated) -> float:
    """The error bar of the difference between two estimates."""
    return difference_error(
        one.plan,
        other.plan,
        one_error=one.estimate.provenance.relative_error,
        other_error=other.estimate.provenance.relative_error,
    )


def are_tied(one: Estimated, other: Estimated, goal: Goal) -> bool:
    """Whether the objectives of two plans differ by no more than their error bar."""
    figures = objective_of(one, goal), objective_of(other, goal)
    return not are_told_apart(*figures, error_between(one, other))


def objective_of(one: Estimated, goal: Goal) -> float:
    """What is minimised: seconds or dollars of an iteration.

    Infinite for a plan of unknown price: it ran on lost nodes, since questions need all prices.
    """
    if goal == "throughput":
        return one.estimate.iteration_s
    usd = one.estimate.money.total_usd
    return math.inf if usd is None else usd


def why_tied(old: Estimated, new: Estimated, goal: Goal) -> str | None:
    """Why a better plan cannot be told apart from another one, if it cannot."""
    was, becomes = objective_of(old, goal), objective_of(new, goal)
    error = error_between(old, new)
    if are_told_apart(was, becomes, error) or becomes <= 0:
        return None
    better = "cheaper" if goal == "cost" else "faster"
    return f"{was / becomes - 1:.1%} {better}, ±{error:.1%}: cannot be told apart"


def preferred(best: _Plan, others: Iterable[_Plan], goal: Goal) -> _Plan:
    """The plan to take among those that cannot be told apart from the best by estimate.

    The cheapest, where it saves enough for its time; then the simplest of those that cost and take
    at most 2 % more, and are as simple or simpler in every count.
    """
    most = objective_of(best, goal) * (1 + GIVEN_AWAY_MAX)
    near = (one for one in others if one is not best and objective_of(one, goal) <= most)
    tied = [best, *(one for one in near if are_tied(one, best, goal))]
    is_priced = all(one.estimate.money.total_usd is not None for one in tied)

    def usd(one: Estimated) -> float:
        return (one.estimate.money.total_usd or 0.0) if is_priced else 0.0

    def worth(one: Estimated) -> tuple[float, float]:
        seconds = one.estimate.iteration_s
        weighted = usd(one) * seconds**TIME_WEIGHT if goal == "throughput" else usd(one)
        return weighted, seconds

    cheapest = min(tied, key=worth)
    seconds, price = cheapest.estimate.iteration_s, usd(cheapest)
    has = simplicity(cheapest.plan)
    equal = (
        one
        for one in tied
        if one.estimate.iteration_s <= seconds * (1 + REPEATED)
        and usd(one) <= price * (1 + REPEATED)
        and all(map(le, simplicity(one.plan), has))
    )
    return min(equal, key=lambda one: (simplicity(one.plan), worth(one)))


def simplicity(plan: Plan) -> tuple[int, ...]:
    """Counts of each of ``SIMPLICITY``, and of what comes then; smaller is simpler."""
    stages = {stage for pipeline in plan.pipelines for stage in pipeline.stages}
    places = {place for stage in stages for place in stage.places}
    return (
        max(len(pipeline.stages) for pipeline in plan.pipelines),
        len({place.gpu for place in places}),
        len({place.zone for place in places}),
        len({stage.tp for stage in stages}),
        _uneven_cuts(plan),
        int(plan.schedule == "zero-bubble"),
        int(plan.zero is not None),
        int(plan.outer_every is not None),
        int(plan.offloads),
    )


def _uneven_cuts(plan: Plan) -> int:
    """Ways to cut the layers beyond one, and whether blocks per stage differ by more than one."""
    cuts = {tuple(stage.layers for stage in pipeline.stages) for pipeline in plan.pipelines}
    last = max(end for cut in cuts for _, end in cut) - 1
    # The embedding and the head are no blocks.
    blocks = [[min(end, last) - max(first, 1) for first, end in cut] for cut in cuts]
    return len(cuts) - 1 + any(max(sizes) - min(sizes) > 1 for sizes in blocks)


def simpler_by(one: Plan, other: Plan) -> str:
    """What one plan has less of than another, such as "1 zone instead of 2"; empty: nothing."""
    pairs = zip(simplicity(one), simplicity(other), strict=True)
    *counts, uneven, divided, other_zero, outer, offload = pairs
    said = [
        f"{less} {name.removesuffix('s') if less == 1 else name} instead of {more}"
        for name, (less, more) in zip(SIMPLICITY, counts, strict=True)
        if less < more
    ]
    said += ["more even layers"] if uneven[0] < uneven[1] else []
    said += ["whole backwards"] if divided[0] < divided[1] else []
    said += ["the job's ZeRO stage"] if other_zero[0] < other_zero[1] else []
    said += ["no outer steps"] if outer[0] < outer[1] else []
    said += ["no offload"] if offload[0] < offload[1] else []
    return ", ".join(said)
