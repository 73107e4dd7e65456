"""The plans of a job: searched once for each availability of the cluster, then looked up.

A plan does not distinguish spot and on-demand pools of one machine type; here they are two pools.
So a plan is stored once for each way to take its GPUs from the pools, with its dollars.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import le

from planner.move_policy.checkpoint_interval import write_s
from planner.problem.inventory import Lot
from planner.problem.objective import NO_MONEY_LIMITS, LimitedFigures, Limits
from planner.problem.question import Answer, Question
from simulator.cluster.cluster import Pool
from simulator.cluster.place_facts import PlaceFacts
from simulator.estimate.result import Estimate
from simulator.inputs.supply_check import groups_by_place
from simulator.spec.job import Goal, Objective
from simulator.spec.plan import PlaceKey, Plan
from simulator.traces.play_types import PlanFigures
from simulator.traces.trace import GpuCounts, cluster_at

TIE = 0.001
"""Plans whose objectives differ by at most this share tie; ``KnownPlan.score`` breaks the tie."""
Search = Callable[[Question], Answer]
Way = tuple[tuple[tuple[int, int], ...], ...]
"""Device groups that a plan takes from each pool, as pairs of TP degree and number."""


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """A plan with the device groups that it takes from each pool."""

    plan: Plan
    estimate: Estimate
    groups: Way
    usd_per_s: float | None
    """Price of its GPUs; ``None`` where a price is unknown."""

    @property
    def gpus(self) -> GpuCounts:
        """GPUs by pool."""
        return tuple(sum(tp * count for tp, count in groups) for groups in self.groups)

    @property
    def usd(self) -> float | None:
        """Dollars of an iteration."""
        if self.usd_per_s is None:
            return None
        return self.usd_per_s * self.estimate.iteration_s + self.estimate.money.egress_usd

    def score(self, goal: Goal) -> tuple[float, float]:
        """The objective, then the tie-breaker (dollars or seconds); smaller is better."""
        # If the GPUs have no price, plans are compared by egress alone.
        egress_usd = self.estimate.money.egress_usd
        seconds, usd = self.estimate.iteration_s, egress_usd if self.usd is None else self.usd
        return (usd, seconds) if goal == "cost" else (seconds, usd)


@dataclass(slots=True, eq=False)
class PlanLibrary:
    """The plans of a job, and the availabilities that each fits."""

    question: Question
    states: dict[GpuCounts, int] = field(default_factory=dict)
    known: list[KnownPlan] = field(default_factory=list)
    searched: int = 0
    without_plan: list[GpuCounts] = field(default_factory=list)
    """Availabilities without a plan; smaller ones have none either."""
    _found: list[tuple[Plan, Estimate]] = field(default_factory=list)
    _asked: dict[int, int] = field(default_factory=dict)
    """How many availabilities were known when a plan was last found, by its place in ``_found``."""
    _fits: dict[tuple[int, int], bool] = field(default_factory=dict)
    _counts: list[GpuCounts] = field(default_factory=list)
    _best: dict[tuple[int, Goal], int | None] = field(default_factory=dict)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of the cluster, in the order of all counts."""
        return self.question.cluster.pools

    @property
    def names(self) -> tuple[str, ...]:
        """The pools by place; a spot pool beside an on-demand pool says so, and so do machines of
        several sizes, of which some lost GPUs.
        """
        keys = Counter(pool.key for pool in self.pools)
        sizes = Counter((pool.key, pool.spot) for pool in self.pools)
        return tuple(
            "/".join(pool.key)
            + (" spot" if pool.spot and keys[pool.key] > sizes[pool.key, True] else "")
            + (f" of {pool.gpus_per_machine}" if sizes[pool.key, pool.spot] > 1 else "")
            for pool in self.pools
        )

    @property
    def goal(self) -> Goal:
        """The goal of the job."""
        return self.question.job.objective.goal

    @property
    def distinct_plans(self) -> int:
        """Number of plans found."""
        return len(self._found)

    def state(self, gpus: GpuCounts) -> int:
        """The number of an availability."""
        if gpus not in self.states:
            self.states[gpus] = len(self.states)
            self._counts.append(gpus)
            self._best.clear()
        return self.states[gpus]

    def spot_only(self, state: int) -> int:
        """The availability without its on-demand GPUs."""
        return self.state(self._keep_contract(self._counts[state], spot=True))

    def on_demand_only(self, state: int) -> int:
        """The availability without its spot GPUs."""
        return self.state(self._keep_contract(self._counts[state], spot=False))

    def has_spot(self, state: int) -> bool:
        """Whether an availability has spot GPUs."""
        return any(
            count and pool.spot for count, pool in zip(self._counts[state], self.pools, strict=True)
        )

    def _keep_contract(self, gpus: GpuCounts, *, spot: bool) -> GpuCounts:
        return tuple(
            count if pool.spot == spot else 0 for count, pool in zip(gpus, self.pools, strict=True)
        )

    def counts(self, state: int) -> GpuCounts:
        """The availability with this number."""
        return self._counts[state]

    def fits(self, plan: int, state: int) -> bool:
        """Whether an availability has the GPUs that a plan takes."""
        key = (plan, state)
        if key not in self._fits:
            self._fits[key] = all(
                not groups or _lot(pool, up).holds(dict(groups))
                for groups, pool, up in zip(
                    self.known[plan].groups, self.pools, self._counts[state], strict=True
                )
            )
        return self._fits[key]

    def machines(self, gpus: GpuCounts) -> GpuCounts:
        """Machines by pool that hold these GPUs."""
        return tuple(
            -(-count // pool.gpus_per_machine) for count, pool in zip(gpus, self.pools, strict=True)
        )

    def whole_machines(self, plan: int) -> GpuCounts:
        """The fewest whole machines by pool on which a plan's groups fit."""
        found = []
        for groups, pool in zip(self.known[plan].groups, self.pools, strict=True):
            size, gpus = pool.gpus_per_machine, sum(tp * count for tp, count in groups)
            count = -(-gpus // size)
            while groups and not _lot(pool, count * size).holds(dict(groups)):
                count += 1
            found.append(count)
        return tuple(found)

    def best(self, state: int) -> int | None:
        """The best known plan that fits an availability; of tied ones the cheapest or fastest."""
        return self._find_best(state, self.goal)

    def fastest(self, state: int) -> int | None:
        """The fastest known plan that fits an availability, whatever the goal."""
        return self._find_best(state, "throughput")

    def within(self, state: int, *, iteration_s: float, usd: float | None) -> list[int]:
        """The known plans that fit an availability, take at most ``iteration_s`` for a step, and
        cost less than ``usd``, where dollars are known.
        """
        found = []
        for plan, known in enumerate(self.known):
            is_cheaper = usd is None or known.usd is None or known.usd < usd
            if is_cheaper and known.estimate.iteration_s <= iteration_s and self.fits(plan, state):
                found.append(plan)
        return found

    def _find_best(self, state: int, goal: Goal) -> int | None:
        key = (state, goal)
        if key not in self._best:
            fitting = [plan for plan in range(len(self.known)) if self.fits(plan, state)]
            self._best[key] = self.best_of(fitting, goal)
        return self._best[key]

    def best_of(self, plans: Sequence[int], goal: Goal) -> int | None:
        """The best of these plans; of tied ones the cheapest or fastest."""
        score = {plan: self.known[plan].score(goal) for plan in plans}
        least = min((objective for objective, _ in score.values()), default=math.inf)
        equal = [plan for plan in plans if score[plan][0] <= least * (1 + TIE)]
        return min(equal, key=lambda plan: (score[plan][1], score[plan][0], plan), default=None)

    def figures(self) -> tuple[PlanFigures, ...]:
        """All plans, as the player needs them."""
        return tuple(self._figures(known) for known in self.known)

    def _figures(self, known: KnownPlan) -> PlanFigures:
        return PlanFigures(
            known.estimate.iteration_s,
            known.estimate.samples_per_iteration,
            known.gpus,
            known.usd_per_s,
            known.estimate.money.egress_usd,
            write_s(self.question.job, sum(self.machines(known.gpus))),
        )

    def add(self, plan: Plan, estimate: Estimate) -> None:
        """Learn a plan, with the ways to take its GPUs from the pools of each availability.

        A known plan is learnt again for the availabilities that were not asked about before.
        """
        if not any(other == plan for other, _ in self._found):
            self._found.append((plan, estimate))
        index = next(n for n, (other, _) in enumerate(self._found) if other == plan)
        asked = [*self.states][self._asked.get(index, 0) :]
        self._asked[index] = len(self.states)
        facts = PlaceFacts(self.question.cluster, self.question.measurements.network)
        prices = tuple(facts.pool_price_usd(pool) for pool in self.pools)
        objective = replace(self.question.job.objective, deadline=None)
        limits = Limits(objective, self.question.job.steps)
        had = {known.groups for known in self.known if known.plan == plan}
        ways = {way for gpus in asked for way in self._ways(plan, gpus, prices)} - had
        for groups in sorted(ways):
            known = KnownPlan(plan, estimate, groups, _usd_per_s(groups, prices))
            if self._keeps(limits, known):
                self.known.append(known)
        self._best.clear()

    def _ways(self, plan: Plan, gpus: GpuCounts, prices: Sequence[float | None]) -> Iterator[Way]:
        """The ways to take a plan's GPUs from an availability: on demand first, cheapest first."""
        pools = range(len(self.pools))
        wanted = groups_by_place(plan)
        if len({pool.key for pool in self.pools}) == len(pools):
            yield tuple(tuple(sorted(wanted.get(pool.key, {}).items())) for pool in self.pools)
            return
        on_demand = sorted(pools, key=lambda pool: self.pools[pool].spot)
        cheapest = sorted(pools, key=lambda pool: (prices[pool] is None, prices[pool] or 0.0))
        for order in (on_demand, cheapest):
            way = _take_groups(wanted, [(pool, self.pools[pool]) for pool in order], gpus)
            if way is not None:
                yield way

    def _keeps(self, limits: Limits, known: KnownPlan) -> bool:
        """Whether a plan keeps the job's limits when its GPUs are taken like this."""
        gpus = known.gpus
        spot = sum(count for count, pool in zip(gpus, self.pools, strict=True) if pool.spot)
        figures = LimitedFigures(known.estimate.iteration_s, known.usd, spot / max(1, sum(gpus)))
        return next(limits.breaches(figures), None) is None


def _take_groups(
    wanted: Mapping[PlaceKey, Mapping[int, int]],
    pools: Sequence[tuple[int, Pool]],
    gpus: GpuCounts,
) -> Way | None:
    """The groups taken from each pool, in the order of the pools; ``None`` if they do not fit."""
    taken: list[dict[int, int]] = [{} for _ in pools]
    for key, groups in wanted.items():
        here = [(number, pool) for number, pool in pools if pool.key == key]
        for tp in sorted(groups, reverse=True):
            left = groups[tp]
            for number, pool in here:
                fits = _count_fitting(_lot(pool, gpus[number]), taken[number], tp, left)
                if fits:
                    taken[number][tp] = fits
                left -= fits
            if left:
                return None
    return tuple(tuple(sorted(groups.items())) for groups in taken)


def _count_fitting(lot: Lot, taken: Mapping[int, int], tp: int, wanted: int) -> int:
    """How many groups of ``tp`` fit beside those that are taken, up to ``wanted``."""
    count = min(wanted, lot.room(tp))
    while count and not lot.holds({**taken, tp: count}):
        count -= 1
    return count


def _lot(pool: Pool, gpus: int) -> Lot:
    """The GPUs of a pool that are up."""
    return Lot(*pool.key, gpus, pool.gpus_per_machine, pool.machines(gpus), None)


def _usd_per_s(
    groups: Sequence[Sequence[tuple[int, int]]], prices: Sequence[float | None]
) -> float | None:
    total = 0.0
    for of_pool, price in zip(groups, prices, strict=True):
        gpus = sum(tp * count for tp, count in of_pool)
        if gpus and price is None:
            return None
        total += gpus * (price or 0.0) / 3600
    return total


def _has_limits(objective: Objective) -> bool:
    names = (*NO_MONEY_LIMITS, "max_spot_share")
    return any(getattr(objective, name) is not None for name in names)


def _mixes_contracts(plans: PlanLibrary) -> bool:
    keys = [pool.key for pool in plans.pools]
    return len(set(keys)) < len(keys)


def learn(
    plans: PlanLibrary,
    gpus: GpuCounts,
    search: Search,
    goal: Goal | None = None,
    *,
    seconds_left: float | None = None,
) -> None:
    """Search the plan of an availability, unless a larger one has no plan.

    With ``seconds_left`` all steps of the job must end within it.
    """
    # On-demand GPUs are charged first: a limit in dollars may allow a plan only with fewer of them.
    is_monotone = not (_has_limits(plans.question.job.objective) and _mixes_contracts(plans))
    if is_monotone and any(all(map(le, gpus, other)) for other in plans.without_plan):
        return
    plans.searched += 1
    asked = replace(plans.question, seconds_left=seconds_left)
    if goal is not None:
        objective = replace(asked.job.objective, goal=goal)
        asked = replace(asked, job=replace(asked.job, objective=objective))
    answer = search(replace(asked, cluster=cluster_at(asked.cluster, gpus)))
    if answer.plan is None:
        if seconds_left is None:
            plans.without_plan.append(gpus)
        return
    assert answer.estimate is not None
    plans.add(answer.plan, answer.estimate)
