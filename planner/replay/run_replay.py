"""Replays one trace under every policy, with upper bounds for all policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planner.library.plan_library import PlanLibrary, Search
from planner.move_policy.deadline import DEADLINE_RULES
from planner.problem.question import Question
from planner.replay.deadline_policies import DeadlinePolicy
from planner.replay.oracle import ORACLE, best_possible, ideal_samples, least_usd
from planner.replay.policies import (
    CheckpointIntervals,
    GreedyPolicy,
    IgnoreAdditions,
    Restart,
    SailorPolicy,
    SkiRental,
)
from planner.replay.trace_plans import plans_for, spans_of
from simulator.traces.play_types import (
    NO_LIMITS,
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


@dataclass(frozen=True, slots=True)
class SteadyRun:
    """All steps on one plan on on-demand GPUs alone."""

    seconds: float
    usd: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The results of a trace."""

    trace: Trace
    plans: PlanLibrary
    figures: tuple[PlanFigures, ...]
    spans: tuple[AvailabilitySpan, ...]
    policy_results: tuple[PolicyResult, ...]
    """Results in the order of ``POLICIES``, or of those with a deadline."""
    least_usd: tuple[float | None, ...]
    """For each policy, the least dollars for which any policy could train as many samples."""
    ideal_samples: float
    """Samples if the best plan of each span ran and reconfigurations cost nothing."""
    deadline_s: float | None = None
    """Seconds from the beginning within which the job has to be done."""
    limits: RunLimits = NO_LIMITS
    steady: SteadyRun | None = None
    """A job with a deadline on the on-demand GPUs that are always there alone, if there are any:
    the cheaper of the preferred and the fastest plan that is in time, else the fastest."""

    @property
    def missed(self) -> tuple[str, ...]:
        """The policies that did not do the job's steps in time."""
        return tuple(each.policy for each in self.policy_results if each.ended != "steps")

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
    limits = RunLimits(question.job.steps, question.job.objective.max_usd_total)
    if has_deadline:
        # A plan for the last steps only may cost more than the budget pays for all of them.
        objective = replace(question.job.objective, deadline=None, max_usd_total=None)
        question = replace(question, job=replace(question.job, objective=objective))
    plans = plans_for(question, trace, taken, search, searches=searches, deadline_s=deadline_s)
    figures = plans.figures()
    spans = spans_of(trace, plans, taken)

    def intervals(*, chooses: bool = chooses_checkpoints) -> CheckpointIntervals:
        return CheckpointIntervals(figures, costs, chooses)

    made: dict[str, Callable[[], Policy]] = {
        "sailor": lambda: SailorPolicy(plans, figures, costs, intervals(), limits.steps),
        "greedy": lambda: GreedyPolicy(plans),
        "ski-rental": lambda: SkiRental(plans, figures, costs),
        "restart": lambda: Restart(plans),
        "ignore-additions": lambda: IgnoreAdditions(plans, trace.never_regained(taken)),
    }
    if deadline_s is not None:
        made = {
            rule: partial(
                DeadlinePolicy, rule, plans, figures, costs,
                intervals(chooses=chooses_checkpoints and rule == "sailor"), limits, deadline_s,
            )
            for rule in DEADLINE_RULES
        }  # fmt: skip
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
        tuple(
            least if least is None or result.usd is None else min(least, result.usd)
            for least, result in zip(
                least_usd(spans, figures, plans.fits, costs, samples), results, strict=True
            )
        ),
        ideal_samples(spans, figures, plans.fits),
        deadline_s,
        limits,
        None
        if deadline_s is None
        else _steady_run(
            plans, figures, _always_up(spans, plans, deadline_s), costs, limits, deadline_s
        ),
    )


def _always_up(spans: Sequence[AvailabilitySpan], plans: PlanLibrary, until_s: float) -> int:
    """The availability of GPUs that are up all the time until a moment."""
    counts = (span.up for span in spans if span.start_s < until_s)
    return plans.state(tuple(map(min, zip(*counts, strict=True))))


def _steady_run(
    plans: PlanLibrary,
    figures: Sequence[PlanFigures],
    state: int,
    costs: ReconfigurationCosts,
    limits: RunLimits,
    deadline_s: float,
) -> SteadyRun | None:
    state = plans.on_demand_only(state)
    preferred, fastest = plans.best(state), plans.fastest(state)
    if preferred is None or fastest is None:
        return None
    assert limits.steps is not None, "a deadline needs steps"
    found = []
    for plan in (figures[fastest], figures[preferred]):
        seconds = limits.steps * plan.iteration_s * (1 + costs.checkpoint_share)
        usd_per_s = plan.usd_per_running_s
        found.append(SteadyRun(seconds, None if usd_per_s is None else seconds * usd_per_s))
    in_time = [run for run in found if run.seconds <= deadline_s]
    return min(in_time, key=lambda run: run.usd or 0.0, default=found[0])
