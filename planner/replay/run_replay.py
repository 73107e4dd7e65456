"""Replay one trace under every policy, with upper bounds for all policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from planner.move_policy.deadline import DEADLINE_RULES
from planner.problem.question import Question
from planner.replay.deadline_policies import DeadlinePolicy
from planner.replay.oracle import ORACLE, best_possible, ideal_samples, least_usd
from planner.replay.plan_library import Search, TracePlans, plans_for, spans_of
from planner.replay.policies import Greedy, IgnoreAdditions, Restart, Sailor, SkiRental
from simulator.traces.play_types import (
    AvailabilitySpan,
    PlanFigures,
    Policy,
    PolicyResult,
    ReconfigurationCosts,
    RunLimits,
)
from simulator.traces.player import play
from simulator.traces.trace import LostSlots, Trace

POLICIES_BY_DEADLINE = (*DEADLINE_RULES, ORACLE)
POLICIES = ("sailor", "greedy", "ski-rental", "restart", "ignore-additions", ORACLE)


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The results of a trace."""

    trace: Trace
    plans: TracePlans
    figures: tuple[PlanFigures, ...]
    spans: tuple[AvailabilitySpan, ...]
    policy_results: tuple[PolicyResult, ...]
    """In the order of ``POLICIES``, or of those with a deadline."""
    least_usd: tuple[float | None, ...]
    """For each policy, the least dollars for which any policy could train as many samples."""
    ideal_samples: float
    """Samples if the best plan of each span ran and reconfigurations cost nothing."""
    deadline_s: float | None = None
    """Seconds from the beginning within which the job has to be done."""
    slowest_s: float | None = None
    """How long it takes on the first on-demand GPUs alone, if there are any."""

    def share_of_ideal(self, result: PolicyResult) -> float | None:
        """What a policy trained until its job ended, as a share of the ideal until then."""
        until_s = result.duration_s
        ideal = ideal_samples(self.spans, self.figures, self.plans.fits, until_s)
        return result.samples / ideal if ideal else None


def replayed(
    question: Question,
    trace: Trace,
    costs: ReconfigurationCosts,
    *,
    taken: Sequence[LostSlots],
    search: Search,
    searches: int,
    chooses_checkpoints: bool = True,
    deadline_s: float | None = None,
) -> Replay:
    """Replay a trace under all policies, with the same plans and the same machines lost.

    With ``chooses_checkpoints`` the policy ``sailor`` chooses their interval. With a deadline the
    policies are those of ``DEADLINE_RULES``.
    """
    has_deadline = deadline_s is not None
    plans = plans_for(question, trace, taken, search, searches=searches, by_contract=has_deadline)
    figures = plans.figures()
    spans = spans_of(trace, plans, taken)
    limits = RunLimits(question.job.steps, question.job.objective.max_usd_total)
    made: dict[str, Callable[[], Policy]] = {
        "sailor": lambda: Sailor(plans, figures, costs, chooses_checkpoints),
        "greedy": lambda: Greedy(plans),
        "ski-rental": lambda: SkiRental(plans, figures, costs),
        "restart": lambda: Restart(plans),
        "ignore-additions": lambda: IgnoreAdditions(plans, trace.never_regained(taken)),
    }
    steps = question.job.steps
    if deadline_s is not None:
        assert steps is not None, "a deadline needs steps"
        made = {
            rule: partial(DeadlinePolicy, rule, plans, figures, costs, steps, deadline_s)
            for rule in DEADLINE_RULES
        }
    results = [play(spans, figures, plans.fits, make(), costs, limits) for make in made.values()]
    results.append(best_possible(spans, figures, plans.fits, costs, limits))
    names = POLICIES_BY_DEADLINE if has_deadline else POLICIES
    assert tuple(result.policy for result in results) == names
    samples = [result.samples for result in results]
    return Replay(
        trace,
        plans,
        figures,
        spans,
        tuple(results),
        tuple(least_usd(spans, figures, plans.fits, costs, samples)),
        ideal_samples(spans, figures, plans.fits),
        deadline_s,
        _on_demand_s(plans, figures, spans, steps) if has_deadline else None,
    )


def _on_demand_s(
    plans: TracePlans,
    figures: Sequence[PlanFigures],
    spans: Sequence[AvailabilitySpan],
    steps: int | None,
) -> float | None:
    best = plans.best(plans.on_demand_only(spans[0].state))
    return None if best is None or steps is None else steps * figures[best].iteration_s
