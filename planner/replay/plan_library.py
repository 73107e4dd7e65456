"""Which plan to run on each availability of a trace: searched for once, then looked up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from planner.problem.inventory import Grant, Lot, are_supplied, grants_of, groups_by_lot, lots_of
from planner.problem.question import Answer, Question
from simulator.cluster.place_facts import PlaceFacts
from simulator.estimate.result import Estimate
from simulator.inputs.supply_check import PlaceKey, pools_by_place
from simulator.spec.job import Goal
from simulator.spec.plan import Plan
from simulator.traces.player import AvailabilitySpan, PlanFigures
from simulator.traces.trace import GpuCounts, LostSlots, Trace, cluster_at

DEFAULT_SEARCHES = 32
"""Availabilities that are searched in full, the longest first; the others take the best plan
that is known and fits, and are searched only if there is none."""

Search = Callable[[Question], Answer]


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """A plan with what it takes of each place."""

    plan: Plan
    estimate: Estimate
    groups: dict[PlaceKey, dict[int, int]]
    """Groups by TP degree."""

    def worth(self, goal: Goal) -> tuple[float, float]:
        """Smaller is better."""
        seconds, usd = self.estimate.iteration_s, self.estimate.money.total_usd or 0.0
        return (usd, seconds) if goal == "cost" else (seconds, usd)


@dataclass(slots=True, eq=False)
class TracePlans:
    """The plans of a trace, and which of them can run when."""

    question: Question
    places: tuple[PlaceKey, ...]
    sizes: GpuCounts
    """GPUs of a machine of each place."""
    states: dict[GpuCounts, int] = field(default_factory=dict)
    known: list[KnownPlan] = field(default_factory=list)
    searched: int = 0
    hopeless: list[GpuCounts] = field(default_factory=list)
    """Searched in vain: whatever has no more than these has no plan either."""
    _counts: list[GpuCounts] = field(default_factory=list)
    _fits: dict[tuple[int, int], bool] = field(default_factory=dict)
    _lots: list[tuple[tuple[Lot, ...], tuple[Grant, ...]]] = field(default_factory=list)
    _best: dict[int, int | None] = field(default_factory=dict)

    @property
    def goal(self) -> Goal:
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
        """The availability of that number."""
        return self._counts[state]

    def gain(self, way: int, *, over: int) -> float:
        """By which share one plan is better than another at what the job wants."""
        better, worse = (self.known[each].worth(self.goal)[0] for each in (way, over))
        return worse / better - 1 if better > 0 else math.inf

    def fits(self, way: int, state: int) -> bool:
        """Whether a plan finds the GPUs that it takes."""
        key = (way, state)
        if key not in self._fits:
            self._fits[key] = are_supplied(self.known[way].groups, *self._lots[state])
        return self._fits[key]

    def machines(self, gpus: GpuCounts) -> GpuCounts:
        """Machines by place that so many GPUs by place stand in."""
        return tuple(-(-count // size) for count, size in zip(gpus, self.sizes, strict=True))

    def best(self, state: int) -> int | None:
        """The best known plan that can run on an availability."""
        if state not in self._best:
            fitting = (way for way in range(len(self.known)) if self.fits(way, state))
            self._best[state] = min(
                fitting, key=lambda way: (*self.known[way].worth(self.goal), way), default=None
            )
        return self._best[state]

    def ways(self) -> tuple[PlanFigures, ...]:
        """All plans as the player sees them."""
        return tuple(self._way(known) for known in self.known)

    def _way(self, known: KnownPlan) -> PlanFigures:
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
    """Search the availabilities that last longest, as many as the budget allows."""
    offers = pools_by_place(question.cluster)
    places = tuple(sorted(offers))
    sizes = tuple(max(pool.gpus_per_machine for pool in offers[key]) for key in places)
    plans = TracePlans(question, places, sizes)
    seconds = trace.distinct()
    for interval, gpus in zip(trace.intervals, trace.never_regained(taken), strict=True):
        seconds[gpus] = seconds.get(gpus, 0.0) + interval.seconds
    for gpus in sorted(seconds, key=lambda gpus: (-seconds[gpus], gpus)):
        state = plans.state(gpus)
        # Where nothing known can run, a search is made whatever the budget: to stand still for
        # want of a search would be no answer.
        is_spent = plans.searched >= searches
        if not sum(gpus) or (
            is_spent and any(plans.fits(way, state) for way in range(len(plans.known)))
        ):
            continue
        if any(_no_more(gpus, than=other) for other in plans.hopeless):
            continue
        plans.searched += 1
        answer = search(replace(question, cluster=cluster_at(question.cluster, gpus)))
        if answer.plan is None:
            plans.hopeless.append(gpus)
            continue
        assert answer.estimate is not None
        found = KnownPlan(answer.plan, answer.estimate, groups_by_lot(answer.plan))
        if all(other.plan != found.plan for other in plans.known):
            plans.known.append(found)
    return plans


def spells_of(
    trace: Trace, plans: TracePlans, taken: Sequence[LostSlots]
) -> tuple[AvailabilitySpan, ...]:
    """The trace as the player wants it: by place, where a cluster may have several pools."""
    pools = plans.question.cluster.pools
    members = [
        [n for n, pool in enumerate(pools) if (pool.gpu, pool.machine, pool.zone) == key]
        for key in plans.places
    ]
    spells = []
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
        spells.append(AvailabilitySpan(interval.start_s, interval.end_s, state, up, tuple(gone)))
        before = interval.gpus
    return tuple(spells)


def _no_more(gpus: GpuCounts, *, than: GpuCounts) -> bool:
    return all(one <= other for one, other in zip(gpus, than, strict=True))
