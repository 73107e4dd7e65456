"""Chooses which machines to rent: the planner picks among those that are up or obtainable.

The planner is asked twice: with the machines that are up, and with obtainable ones added. The
additional machines are wanted if the better plan repays waiting and reconfiguring for them, given
how long Spot machines live in each zone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.api import best_answer, plan_job
from planner.move_policy.deadline import SPOT_SLOWDOWN_MAX, steps_on_spot
from planner.move_policy.decide_move import PossibleMove, Unit, judge_move
from planner.move_policy.move_gain import pool_name
from planner.problem.objective import Limits, pick_tightest
from planner.problem.preference import PlanEstimate, why_tied
from planner.problem.question import Answer, Question, read_ahead
from planner.replan.nodes import PlannerNode, cluster_with
from planner.search.search_cache import SearchCache
from sailord.planning.job_spec import read_job
from sailord.planning.live_cluster import cluster_of, of_known_price
from sailord.planning.messages import (
    CapacityAnswer,
    CapacityRequest,
    DeadlineChoices,
    EndRequest,
    MachineChoice,
    PoolSupply,
    WorkLeft,
)
from sailord.planning.spot_mix import MixPlace, split_by_pool
from simulator.api import Measurements, load_measurements
from simulator.cluster.cluster import Cluster
from simulator.cluster.cluster_file import load_cluster
from simulator.documents.problems import InputError
from simulator.estimate.result import Estimate
from simulator.spec.job import Goal, Job, Preference

CHEAPER = 1 - 1e-9
"""A step on spot machines must cost at most this share of one on demand: less, by more than
rounding."""
DEAR = "spot machines cost as much by the step as on-demand ones"


def choose_capacity(request: CapacityRequest) -> CapacityAnswer:
    """Return how many machines of each pool there should be, and why.

    For a job with a deadline, where there are spot and on-demand pools, the counts exclude machines
    on demand that are rented for it; ``choices`` has its plans on spot and on on-demand alone.
    """
    if {pool.spot for pool in request.pools} != {True, False}:
        return _choose(request)
    base = replace(request, pools=tuple(_without_rent(p, request) for p in request.pools))
    if request.left is None or not any(pool.is_on_demand for pool in request.pools):
        # A plan is priced as if it took its on-demand machines first, so one search over both
        # contracts would not find what spot machines save.
        spot = replace(base, pools=tuple(map(_without_queue, base.pools)))
        found = _choose(spot) if _goal(request) == "cost" else None
        return _choose(request) if found is None or found.counts is None else found
    return _choose_by_contract(base, request, request.left)


def _goal(request: CapacityRequest) -> Goal | None:
    try:
        return read_job(request.spec).objective.goal
    except InputError:
        return None  # The search reads the job again, and reports the mistake.


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What a plan has to keep besides the job's own limits, and its goal, if it is another one."""

    goal: Goal | None = None
    step_s: float | None = None
    step_usd: float | None = None
    usd_per_hour: float | None = None

    def on(self, job: Job) -> Job:
        """Return the job with these limits."""
        own = job.objective
        pace = None if self.step_s is None else 1 / self.step_s
        objective = replace(
            own,
            goal=self.goal or own.goal,
            min_iterations_per_s=max(filter(None, (own.min_iterations_per_s, pace)), default=None),
            max_usd_per_iteration=pick_tightest(own.max_usd_per_iteration, self.step_usd),
            max_usd_per_hour=pick_tightest(own.max_usd_per_hour, self.usd_per_hour),
        )
        return replace(job, objective=objective)


NO_BOUNDS = _Bounds()


def _choose(
    request: CapacityRequest, bounds: _Bounds = NO_BOUNDS, *, explains: bool = True
) -> CapacityAnswer:
    try:
        asker = _Asker.of(request, bounds)
        up, obtainable = (
            asker.usable(_nodes_of(request.pools, which)) for which in ("up", "obtainable")
        )
        if not up and not obtainable:
            return CapacityAnswer(None, "no machine is up or obtainable")
        now = asker.ask(up, explains=False) if up else None
        prefer = asker.job.objective.prefer
        best = asker.ask((*up, *obtainable), prefer=prefer, explains=explains)
    except InputError as error:
        return CapacityAnswer(None, "; ".join(map(str, error.problems)))
    if best.plan is None or best.estimate is None:
        return CapacityAnswer(
            None, "; ".join(map(str, best.problems)) or "no plan fits the obtainable machines"
        )
    if now is None or now.plan is None or now.estimate is None:
        return CapacityAnswer(
            _counts(best, request), "the machines that are up are not enough for the job"
        )
    verdict = judge_move(
        _offer(now, best, asker.job, request),
        request.past.history,
        now_s=request.past.now_s,
    )
    if verdict.moves:
        return CapacityAnswer(_counts(best, request), verdict.sentence)
    return CapacityAnswer(_counts(now, request), verdict.sentence)


@dataclass(frozen=True, slots=True)
class _Asker:
    """Asks the planner about a job on machines of the request's pools."""

    job: Job
    cluster: Cluster
    measurements: Measurements

    @staticmethod
    def of(request: CapacityRequest, bounds: _Bounds = NO_BOUNDS) -> _Asker:
        job = read_job(request.spec, begun=request.begun, usd_max=request.usd_max)
        job = replace(bounds, usd_per_hour=request.usd_per_hour_max).on(job)
        nodes = [*_nodes_of(request.pools, "up"), *_nodes_of(request.pools, "obtainable")]
        prices = [each for pool in request.pools if (each := pool.price) is not None]
        cluster = cluster_of(request.cluster_file, nodes, prices)
        measurements = load_measurements(
            request.profiles,
            catalogue=cluster.catalogue,
            links=request.links and request.links[0],
        )
        return _Asker(job, cluster, read_ahead(measurements, job, cluster.catalogue))

    def usable(self, nodes: Sequence[PlannerNode]) -> list[PlannerNode]:
        """Return the nodes that a plan may use: where dollars count, those of known price."""
        if not Limits(self.job.objective).needs_prices:
            return list(nodes)
        priced = of_known_price(nodes, self.cluster, self.measurements.network)
        return [node for node in nodes if node in priced]

    def ask(
        self,
        nodes: Sequence[PlannerNode] | None,
        *,
        prefer: Preference = "fastest",
        proves: bool = True,
        explains: bool = True,
    ) -> Answer:
        """Return the best plan on these machines, or the reasons why there is none.

        ``None``: on those of the cluster.
        """
        cluster = self.cluster if nodes is None else cluster_with(self.cluster, nodes)
        asked = Question(
            *(self.job, cluster, self.measurements),
            proves=proves,
            is_bounded=False,
            prefer=prefer,
        )
        return plan_job(asked) if explains else best_answer(asked, SearchCache())


def shortest_s(request: EndRequest) -> float | str:
    """Return the seconds of all steps left on the fastest plan, or why there is none."""
    found = _estimate(request, "throughput")
    return found if isinstance(found, str) else _steps(request) * found.iteration_s


def least_usd(request: EndRequest) -> float | str:
    """Return the dollars of all steps left on the cheapest plan, or why they are not known."""
    found = _estimate(request, "cost")
    if isinstance(found, str):
        return found
    usd = found.money.total_usd
    return "the price of a machine is not known" if usd is None else _steps(request) * usd


def _steps(request: EndRequest) -> int:
    """The steps that are left."""
    steps = read_job(request.spec).steps
    assert steps is not None
    return max(steps - request.begun, 0)


def _estimate(request: EndRequest, goal: Goal) -> Estimate | str:
    """The best plan by a goal on all machines that there could be, or why there is none.

    With goal ``cost`` whatever it costs in total.
    """
    try:
        job, pools = read_job(request.spec, begun=request.begun), request.pools
        nodes: Sequence[PlannerNode] | None = None
        if pools is None:
            file = load_cluster(request.cluster_file)
            found = load_measurements(request.profiles, catalogue=file.catalogue)
            asker = _Asker(job, file, read_ahead(found, job, file.catalogue))
        else:
            asked = CapacityRequest(
                request.spec, request.cluster_file, request.profiles, pools,
                request.usd_per_hour_max, 0.0, request.links, begun=request.begun,
            )  # fmt: skip
            nodes = (*_nodes_of(pools, "up"), *_nodes_of(pools, "obtainable"))
            asker = _Asker.of(asked)
        objective = replace(asker.job.objective, goal=goal)
        if goal == "cost":
            objective = replace(objective, max_usd_total=None)
        asker = replace(asker, job=replace(asker.job, objective=objective))
        best = asker.ask(nodes, proves=False)
    except InputError as error:
        return "; ".join(map(str, error.problems))
    if best.estimate is None:
        return "; ".join(map(str, best.problems)) or "no plan fits"
    return best.estimate


# ---- deadlines ----------------------------------------------------------------------------------


def _without_queue(pool: PoolSupply) -> PoolSupply:
    """The supply of a pool without machines for which a request would have to wait."""
    return replace(pool, obtainable=0) if pool.flex else pool


def _without_rent(pool: PoolSupply, request: CapacityRequest) -> PoolSupply:
    """The supply of a pool without on-demand machines that are rented for a deadline."""
    if not pool.is_on_demand:
        return pool
    up = min(pool.up, pool.unrented + request.on_demand_min)
    more = min(pool.obtainable, max(pool.unrented + request.on_demand_min - up, 0))
    return replace(pool, up=up, obtainable=more, ready=min(pool.ready, up))


def _choose_by_contract(
    base: CapacityRequest, request: CapacityRequest, left: WorkLeft
) -> CapacityAnswer:
    """What the job could run on: spot machines alone, or on-demand ones alone."""
    steady = tuple(p if p.is_on_demand else replace(p, up=0, obtainable=0) for p in request.pools)
    on_demand, why_not = _choice(request, steady)
    fastest = on_demand
    if on_demand is not None and _goal(request) == "cost":
        fastest, _ = _choice(request, steady, _Bounds(goal="throughput"))
    bounds = NO_BOUNDS
    if on_demand is not None and fastest is not None:
        bounds = _bounds_on_spot(base, left, on_demand, fastest)
    found, is_dear = _choose(base, bounds, explains=False), False
    if found.counts is None:
        found = _choose(base)
        has_spot = any(p.up + p.obtainable for p in base.pools if not p.is_on_demand)
        is_dear = has_spot and bounds != NO_BOUNDS and found.counts is not None
    if is_dear:
        found = CapacityAnswer((0,) * len(base.pools), DEAR)
    spot = tuple(pool.up for pool in base.pools) if found.counts is None else found.counts
    ready = tuple(replace(pool, up=pool.ready, obtainable=0) for pool in base.pools)
    now, _ = _choice(request, ready, bounds)
    return replace(found, choices=DeadlineChoices(spot, now, on_demand, fastest, why_not, is_dear))


def _bounds_on_spot(
    base: CapacityRequest, left: WorkLeft, on_demand: MachineChoice, fastest: MachineChoice
) -> _Bounds:
    """What a plan on spot machines has to keep: it costs less by the step than on demand.

    With goal ``cost`` it is the cheapest that is not much slower than on demand, or the fastest,
    whichever is expected to save more until the deadline, as in replays.
    """
    usd = on_demand.step_usd
    if usd is None:
        return NO_BOUNDS
    quick = _Bounds("throughput", step_usd=usd * CHEAPER)
    if _goal(base) != "cost":
        is_priced = all(pool.usd_per_hour is not None for pool in base.pools if pool.up)
        return quick if is_priced else NO_BOUNDS
    cheap = replace(quick, goal="cost", step_s=SPOT_SLOWDOWN_MAX * fastest.step_s)

    def saved_usd(bounds: _Bounds) -> float:
        found, _ = _choice(base, base.pools, bounds)
        if found is None or found.step_usd is None:
            return -1.0
        by_spot = steps_on_spot(
            left.steps, left.seconds, left.spot_share, found.step_s, fastest.step_s
        )
        return by_spot * (usd - found.step_usd)

    saved = saved_usd(cheap)
    return quick if saved_usd(quick) >= saved else cheap


def _choice(
    request: CapacityRequest, pools: tuple[PoolSupply, ...], bounds: _Bounds | None = None
) -> tuple[MachineChoice | None, str]:
    """The best plan on machines of these pools; without bounds also why there is none."""
    asked = replace(request, pools=pools, on_demand_min=max(request.on_demand_min, 1))
    nodes = (*_nodes_of(pools, "up"), *_nodes_of(pools, "obtainable"))
    if not nodes:
        return None, "none can be had"
    try:
        asker = _Asker.of(asked, bounds or NO_BOUNDS)
        best = asker.ask(asker.usable(nodes), proves=False, explains=bounds is None)
    except InputError as error:
        return None, "; ".join(map(str, error.problems))
    if best.plan is None or best.estimate is None:
        return None, "; ".join(map(str, best.problems)) or "no plan fits them"
    step_s, usd = best.estimate.iteration_s, best.estimate.money.total_usd
    per_hour = None if usd is None else usd / step_s * 3600
    return MachineChoice(_counts(best, asked), step_s, per_hour), ""


def _nodes_of(pools: Sequence[PoolSupply], which: str) -> tuple[PlannerNode, ...]:
    return tuple(
        PlannerNode(f"{which}-{p.zone}-{p.machine}-{number}-{p.spot}", p.gpu, p.machine, p.zone,
                    p.gpus, p.spot)
        for p in pools
        for number in range(p.up if which == "up" else p.obtainable)
    )  # fmt: skip


def _counts(answer: Answer, request: CapacityRequest) -> tuple[int, ...]:
    """How many machines of each pool the plan uses."""
    assert answer.plan is not None
    gpus: Counter[MixPlace] = Counter()
    for pipeline in answer.plan.pipelines:
        for stage in answer.plan.owning_stages(pipeline):
            for place in stage.places:
                gpus[place.gpu, place.machine, place.zone] += stage.tp
    spot_first = answer.pays_spot_first
    return split_by_pool(gpus, request.pools, request.on_demand_min, spot_first=spot_first)


def _offer(now: Answer, best: Answer, job: Job, request: CapacityRequest) -> PossibleMove:
    assert now.plan is not None
    assert now.estimate is not None
    assert best.plan is not None
    assert best.estimate is not None
    old, new = now.estimate, best.estimate
    counts = _counts(best, request)
    newcomers, before, after = Counter[str](), Counter[str](), Counter[str]()
    for pool, was, count in zip(request.pools, _counts(now, request), counts, strict=True):
        name = pool_name(PlannerNode("", pool.gpu, pool.machine, pool.zone, pool.gpus, pool.spot))
        before[name] += was
        after[name] += count
        newcomers[name] += max(0, count - pool.up)
    usd = old.money.total_usd, new.money.total_usd
    left_s = _seconds_left(new, request.usd_left)
    unit: Unit = "samples"
    gain = new.throughput_samples_per_s - old.throughput_samples_per_s
    cost, loss = old.throughput_samples_per_s, new.throughput_samples_per_s
    if job.objective.goal == "cost" and usd[0] is not None and usd[1] is not None:
        unit = "$"
        gain = (usd[0] - usd[1]) / new.iteration_s
        cost, loss = usd[0] / old.iteration_s, usd[1] / new.iteration_s
    return PossibleMove(
        gain,
        unit,
        cost * request.move_s,
        request.move_s,
        +newcomers,
        # Nothing is forgone while machines are not rented: only an expected gain justifies renting.
        newcomer_age_s=0.0,
        seconds_left=left_s,
        before=+before,
        after=+after,
        loss_cost=loss * request.move_s,
        tied=why_tied(
            PlanEstimate(now.plan, old), PlanEstimate(best.plan, new), job.objective.goal
        ),
    )


def _seconds_left(estimate: Estimate, usd_left: float | None) -> float | None:
    """How long the plan could run on the rest of the budget."""
    usd = estimate.money.total_usd
    return None if usd_left is None or not usd else usd_left / usd * estimate.iteration_s
