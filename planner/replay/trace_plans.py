"""The plans that a replay uses: those of the availabilities that last longest."""

from __future__ import annotations

from collections.abc import Sequence

from planner.library.plan_library import PlanLibrary, Search, learn
from planner.problem.question import Question
from simulator.spec.job import Goal
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
    by_contract: bool = False,
) -> PlanLibrary:
    """Search the availabilities that last longest, up to ``searches`` of them.

    With ``by_contract``, spot and on-demand GPUs are also searched apart, and on-demand GPUs for
    the fastest plan, too, which a deadline may need whatever the goal.
    """
    plans = PlanLibrary(question)
    seconds: dict[GpuCounts, float] = trace.distinct()
    for interval, gpus in zip(trace.intervals, trace.never_regained(taken), strict=True):
        seconds[gpus] = seconds.get(gpus, 0.0) + interval.seconds
    for gpus in sorted(seconds, key=lambda gpus: (-seconds[gpus], gpus)):
        state = plans.state(gpus)
        if by_contract:
            plans.spot_only(state)
            plans.on_demand_only(state)
    for gpus, state in list(plans.states.items()):
        goals: list[Goal] = [plans.goal]
        if by_contract and plans.goal == "cost" and not plans.has_spot(state):
            goals.insert(0, "throughput")
        for goal in goals:
            # Search beyond the budget where no known plan fits, so that the job never idles for
            # lack of a search.
            is_spent = plans.searched >= searches
            if sum(gpus) and not (is_spent and plans.best(state) is not None):
                learn(plans, gpus, search, goal)
    return plans


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
