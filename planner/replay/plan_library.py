"""The plans that a replay uses: searched once for each availability, then looked up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import le

from planner.problem.inventory import Grant, Lot, are_supplied, grants_of, lots_of
from planner.problem.question import Answer, Question
from simulator.cluster.place_facts import PlaceFacts
from simulator.estimate.result import Estimate
from simulator.inputs.supply_check import groups_by_place, pools_by_place
from simulator.spec.job import Goal
from simulator.spec.plan import PlaceKey, Plan
from simulator.traces.player import AvailabilitySpan, PlanFigures
from simulator.traces.trace import GpuCounts, LostSlots, Trace, cluster_at

DEFAULT_SEARCHES = 32
"""Availabilities that are searched, the longest first. The others take the best known plan that
fits, and are searched only if none does."""

Search = Callable[[Question], Answer]


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """A plan with the device groups that it takes."""

    plan: Plan
    estimate: Estimate
    groups: dict[PlaceKey, dict[int, int]]
    """Groups by place and TP degree."""

    def worth(self, goal: Goal) -> tuple[float, float]:
        """The objective, then the tie-breaker; smaller is better."""
        seconds, usd = self.estimate.iteration_s, self.estimate.money.total_usd or 0.0
        return (usd, seconds) if goal == "cost" else (seconds, usd)


@dataclass(slots=True, eq=False)
class TracePlans:
    """The plans of a trace, and the availabilities that each fits."""

    question: Question
    places: tuple[PlaceKey, ...]
    sizes: GpuCounts
    """GPUs of a machine at each place."""
    states: dict[GpuCounts, int] = field(default_factory=dict)
    known: list[KnownPlan] = field(default_factory=list)
    searched: int = 0
    without_plan: list[GpuCounts] = field(default_factory=list)
    """Availabilities without a plan; smaller ones have none either."""
    _counts: list[GpuCounts] = field(default_factory=list)
    _fits: dict[tuple[int, int], bool] = field(default_factory=dict)
    _lots: list[tuple[tuple[Lot, ...], tuple[Grant, ...]]] = field(default_factory=list)
    _best: dict[int, int | None] = field(default_factory=dict)

    @property
    def goal(self) -> Goal:
        """The goal of the job."""
        return self.question.job.objective.goal

    def state(self, gpus: GpuCounts) -> int:
        """The number of an availability."""
        if gpus not in self.states:
            cluster = cluster_at(self.question.cluster, gpus)
            lots = lots_of(cluster, PlaceFacts(cluster, self.question.measurements.network))
            self.states[gpus] = len(self.states)
            self._counts.append(gpus)
            self._lots.append((lots, grants_of(cluster, lots)))
        return self.states[gpus]

    def counts(self, state: int) -> GpuCounts:
        """The availability with this number."""
        return self._counts[state]

    def gain(self, plan: int, *, over: int) -> float:
        """Share by which one plan is better than another."""
        better, worse = (self.known[each].worth(self.goal)[0] for each in (plan, over))
        return worse / better - 1 if better > 0 else math.inf

    def fits(self, plan: int, state: int) -> bool:
        """Whether an availability has the GPUs that a plan takes."""
        key = (plan, state)
        if key not in self._fits:
            self._fits[key] = are_supplied(self.known[plan].groups, *self._lots[state])
        return self._fits[key]

    def machines(self, gpus: GpuCounts) -> GpuCounts:
        """Machines by place that hold these GPUs."""
        return tuple(-(-count // size) for count, size in zip(gpus, self.sizes, strict=True))

    def best(self, state: int) -> int | None:
        """The best known plan that fits an availability."""
        if state not in self._best:
            fitting = (plan for plan in range(len(self.known)) if self.fits(plan, state))
            self._best[state] = min(
                fitting, key=lambda plan: (*self.known[plan].worth(self.goal), plan), default=None
            )
        return self._best[state]

    def figures(self) -> tuple[PlanFigures, ...]:
        """All plans, as the player needs them."""
        return tuple(self._figures(known) for known in self.known)

    def _figures(self, known: KnownPlan) -> PlanFigures:
        taken = {
            key: sum(tp * count for tp, count in groups.items())
            for key, groups in known.groups.items()
        }
        estimate = known.estimate
        compute = estimate.money.compute_usd
        return PlanFigures(
            estimate.iteration_s,
            estimate.samples_per_iteration,
            tuple(taken.get(key, 0) for key in self.places),
            None if compute is None else compute / estimate.iteration_s,
            estimate.money.egress_usd,
        )


def plans_for(
    question: Question, trace: Trace, taken: Sequence[LostSlots], search: Search, *, searches: int
) -> TracePlans:
    """Search the availabilities that last longest, up to ``searches`` of them."""
    offers = pools_by_place(question.cluster)
    places = tuple(sorted(offers))
    sizes = tuple(max(pool.gpus_per_machine for pool in offers[key]) for key in places)
    plans = TracePlans(question, places, sizes)
    seconds = trace.distinct()
    for interval, gpus in zip(trace.intervals, trace.never_regained(taken), strict=True):
        seconds[gpus] = seconds.get(gpus, 0.0) + interval.seconds
    for gpus in sorted(seconds, key=lambda gpus: (-seconds[gpus], gpus)):
        state = plans.state(gpus)
        # Search beyond the budget where no known plan fits, so that the job never idles for lack of
        # a search.
        is_spent = plans.searched >= searches
        if not sum(gpus) or (
            is_spent and any(plans.fits(plan, state) for plan in range(len(plans.known)))
        ):
            continue
        if any(all(map(le, gpus, other)) for other in plans.without_plan):
            continue
        plans.searched += 1
        answer = search(replace(question, cluster=cluster_at(question.cluster, gpus)))
        if answer.plan is None:
            plans.without_plan.append(gpus)
            continue
        assert answer.estimate is not None
        found = KnownPlan(answer.plan, answer.estimate, groups_by_place(answer.plan))
        if all(other.plan != found.plan for other in plans.known):
            plans.known.append(found)
    return plans


def spans_of(
    trace: Trace, plans: TracePlans, taken: Sequence[LostSlots]
) -> tuple[AvailabilitySpan, ...]:
    """The trace as the player needs it, by place; a place may have several pools."""
    pools = plans.question.cluster.pools
    members = [[n for n, pool in enumerate(pools) if pool.key == key] for key in plans.places]
    spans = []
    before = trace.intervals[0].gpus
    for interval, slots in zip(trace.intervals, taken, strict=True):
        gone = []
        for of_place in members:
            first, joined = 0, list[int]()
            for pool in of_place:
                joined += [first + slot for slot in slots[pool]]
                first += before[pool]
            gone.append(tuple(joined))
        up = tuple(sum(interval.gpus[pool] for pool in of_place) for of_place in members)
        state = plans.state(interval.gpus)
        spans.append(AvailabilitySpan(interval.start_s, interval.end_s, state, up, tuple(gone)))
        before = interval.gpus
    return tuple(spans)
