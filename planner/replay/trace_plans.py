"""The plans that a replay uses: those of the availabilities that last longest."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.library.plan_library import PlanLibrary, Search, learn
from planner.move_policy.deadline import SPOT_SLOWDOWN_MAX
from planner.problem.question import Question
from simulator.traces.play_types import AvailabilitySpan
from simulator.traces.trace import GpuCounts, LostSlots, Trace

DEFAULT_SEARCHES = 32
"""Availabilities that are searched, the longest first. The others take the best known plan that
fits, and are searched only if none does."""


def plans_for(
    question: Question,
    trace: Trace,
    taken: Sequence[LostSlots],
    search: Search,
    *,
    searches: int,
    deadline_s: float | None = None,
) -> PlanLibrary:
    """Search the availabilities that last longest, up to ``searches`` of them.

    With a deadline, spot and on-demand GPUs are also searched apart.
    """
    plans = PlanLibrary(question)
    seconds: dict[GpuCounts, float] = trace.distinct()
    for interval, gpus in zip(trace.intervals, trace.never_regained(taken), strict=True):
        seconds[gpus] = seconds.get(gpus, 0.0) + interval.seconds
    for gpus in sorted(seconds, key=lambda gpus: (-seconds[gpus], gpus)):
        state = plans.state(gpus)
        if deadline_s is not None:
            plans.spot_only(state)
            plans.on_demand_only(state)
    if deadline_s is not None:
        _learn_by_contract(plans, search, searches, deadline_s)
        return plans
    for gpus in list(plans.states):
        if _is_worth_a_search(plans, gpus, searches):
            learn(plans, gpus, search)
    return plans


def _learn_by_contract(
    plans: PlanLibrary, search: Search, searches: int, deadline_s: float
) -> None:
    """Search on-demand GPUs, then spot GPUs, and both together where on demand has no plan.

    With goal ``cost`` both are also searched for the fastest plan, which may be needed. The
    cheapest plan on demand ends by the deadline; on spot it is not much slower than the fastest on
    demand.
    """
    steps, is_cost = plans.question.job.steps, plans.goal == "cost"
    assert steps is not None, "a deadline needs steps"
    states = [gpus for gpus in plans.states if _is_worth_a_search(plans, gpus, searches)]
    for gpus in states:
        if plans.has_spot(plans.state(gpus)) or not _is_worth_a_search(plans, gpus, searches):
            continue
        learn(plans, gpus, search, "throughput")
        if is_cost:
            learn(plans, gpus, search, seconds_left=deadline_s)
    fastest_s = min((known.estimate.iteration_s for known in plans.known), default=math.inf)
    slowest_s = steps * SPOT_SLOWDOWN_MAX * fastest_s
    for gpus in states:
        on_demand = plans.best(plans.on_demand_only(plans.state(gpus)))
        if on_demand is None and _is_worth_a_search(plans, gpus, searches):
            learn(plans, gpus, search, "throughput")
            if is_cost:
                learn(plans, gpus, search, seconds_left=slowest_s)


def _is_worth_a_search(plans: PlanLibrary, gpus: GpuCounts, searches: int) -> bool:
    """Whether searches are left, or no known plan fits, so that a job would idle without one."""
    return bool(sum(gpus)) and (plans.searched < searches or plans.best(plans.state(gpus)) is None)


def spans_of(
    trace: Trace, plans: PlanLibrary, taken: Sequence[LostSlots]
) -> tuple[AvailabilitySpan, ...]:
    """The trace as the player needs it."""
    return tuple(
        AvailabilitySpan(
            interval.start_s,
            interval.end_s,
            plans.state(interval.gpus),
            interval.gpus,
            slots,
            trace.notice_s,
        )
        for interval, slots in zip(trace.intervals, taken, strict=True)
    )
