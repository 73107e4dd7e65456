"""Replay one trace under every policy, with upper bounds for all policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.problem.question import Question
from planner.replay.oracle import ORACLE, best_possible, ideal_samples
from planner.replay.plan_library import Search, TracePlans, plans_for, spans_of
from planner.replay.policies import IgnoreAdditions, Restart, Sailor
from simulator.traces.player import (
    AvailabilitySpan,
    PlanFigures,
    Policy,
    PolicyResult,
    ReconfigurationCosts,
    play,
)
from simulator.traces.trace import LostSlots, Trace

POLICIES = ("sailor", "restart", "ignore-additions", ORACLE)


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The results of a trace."""

    trace: Trace
    plans: TracePlans
    figures: tuple[PlanFigures, ...]
    spans: tuple[AvailabilitySpan, ...]
    policy_results: tuple[PolicyResult, ...]
    """In the order of ``POLICIES``."""
    ideal_samples: float
    """Samples if the best plan of each span ran and reconfigurations cost nothing."""


def replayed(
    question: Question,
    trace: Trace,
    costs: ReconfigurationCosts,
    *,
    taken: Sequence[LostSlots],
    search: Search,
    searches: int,
) -> Replay:
    """Replay a trace under all policies, with the same plans and the same machines lost."""
    plans = plans_for(question, trace, taken, search, searches=searches)
    figures = plans.figures()
    spans = spans_of(trace, plans, taken)
    policies: tuple[Policy, ...] = (
        Sailor(plans, figures, costs),
        Restart(plans),
        IgnoreAdditions(plans, trace.never_regained(taken)),
    )
    policy_results = [play(spans, figures, plans.fits, policy, costs) for policy in policies]
    policy_results.append(best_possible(spans, figures, plans.fits, costs))
    assert tuple(policy_result.policy for policy_result in policy_results) == POLICIES
    return Replay(
        trace,
        plans,
        figures,
        spans,
        tuple(policy_results),
        ideal_samples(spans, figures, plans.fits),
    )
