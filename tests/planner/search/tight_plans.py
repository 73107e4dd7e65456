"""Random plans that just fit their devices, all plans of small cases, and their bounds."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

from planner.pipelines.pipeline_template import TemplateMaker
from planner.problem.inventory import Lot, lots_of
from planner.problem.objective import Limits
from planner.problem.question import Answer
from planner.search.bound import EventBound
from planner.search.stage_limits import StageTimeTables
from simulator.cluster.cluster import Cluster, Pool
from simulator.cluster.place_facts import PlaceFacts
from simulator.estimate.event_estimator import EventEstimator
from simulator.spec.job import Goal, RecomputePolicy
from simulator.spec.plan import Place, Plan
from tests.planner.small_cases import SmallCase, is_possible
from tests.simulator.worlds import GPUS_PER_MACHINE, World, placed, with_shares

TablesOf = Callable[[EventEstimator, tuple[Lot, ...], RecomputePolicy], StageTimeTables]


def any_recomputation(rng: random.Random, plan: Plan) -> tuple[Plan, RecomputePolicy]:
    """The plan with another recomputation, and a policy that allows it."""
    policy: RecomputePolicy = rng.choice(["auto", "auto", "none", "full"])
    if policy == "auto":
        return with_shares(rng, plan), policy
    pipelines = (
        replace(each, stages=tuple(replace(stage, recompute=policy) for stage in each.stages))
        for each in plan.pipelines
    )
    return replace(plan, pipelines=tuple(pipelines)), policy


@contextmanager
def just_fitting(rng: random.Random, world: World, plan: Plan) -> Iterator[None]:
    """In two of three cases no device has more memory than the fullest one of the plan needs."""
    if rng.random() < 1 / 3:
        yield
        return
    most = max(one.total for row in world.estimator.estimate(plan).memory for one in row)
    with patch.object(PlaceFacts, "capacity_bytes", return_value=most * (1 + 1e-9)):
        yield


def just_enough(plan: Plan, world: World) -> Cluster:
    """A cluster of as few machines as hold the plan."""
    used: Counter[Place] = Counter()
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            used[stage.place] += stage.tp
    prices = {(pool.gpu, pool.zone): pool.price_usd_per_gpu_hour for pool in world.cluster.pools}
    return Cluster(
        tuple(
            Pool(
                place.zone,
                place.gpu,
                place.machine,
                GPUS_PER_MACHINE,
                -(-count // GPUS_PER_MACHINE) * GPUS_PER_MACHINE,
                price_usd_per_gpu_hour=prices[place.gpu, place.zone],
                price_source="cluster file",
            )
            for place, count in used.items()
        ),
        world.cluster.catalogue,
        world.cluster.zone_regions,
    )


def placed_somehow(plan: Plan, rng: random.Random) -> Plan:
    """The plan with a random placement: by rule, some pipelines together, or on named nodes."""
    if rng.random() < 0.3:
        return placed(plan)
    return replace(plan, together=rng.choice([None, 1, 1, 2]))


def tables_of(
    judge: EventEstimator,
    lots: tuple[Lot, ...],
    recompute: RecomputePolicy = "auto",
    degrees: Sequence[int] = (1, 2, 4),
    *,
    divides: bool = False,
    takes_outer_steps: bool = False,
    offloads: bool = False,
) -> StageTimeTables:
    """The tables of a search on these GPUs."""
    return StageTimeTables(
        TemplateMaker(judge.costs, judge.network, judge.facts, lots, offloads=offloads),
        lots,
        degrees=degrees,
        recompute=recompute,
        per_layer_sync=judge.overlaps,
        divides=divides,
        takes_outer_steps=takes_outer_steps,
    )


def bound_of(world: World, plan: Plan, tables: StageTimeTables, goal: Goal) -> EventBound:
    """The bound over all plans of the plan's micro batch size."""
    limits = Limits(replace(world.job.objective, goal=goal))
    sizes = [plan.micro_batch_size]
    return EventBound(tables, tables.lots, (), limits, plan.samples_per_iteration, sizes, gap=1e-9)


def keeps_bound(
    rng: random.Random, world: World, plan: Plan, goal: Goal, tables: TablesOf, case: int
) -> None:
    """Assert that a plan, as it just fits on few machines, is not below its bound."""
    plan, policy = any_recomputation(rng, plan)
    lots = lots_of(just_enough(plan, world), world.estimator.facts)
    plan = placed_somehow(plan, rng)
    with just_fitting(rng, world, plan):
        estimate = world.estimator.estimate(plan)
        usd = estimate.money.total_usd
        assert estimate.fits, case
        assert usd is not None, case
        score = usd if goal == "cost" else estimate.iteration_s
        bound = bound_of(world, plan, tables(world.estimator, lots, policy), goal)
        bounds = bound.bounds(2 * estimate.iteration_s, 2 * score)
    assert bounds.objective <= score, case
    assert bounds.seconds <= estimate.iteration_s, case


@dataclass(frozen=True, slots=True)
class Least:
    """What no bound of a small case may exceed."""

    scores: Mapping[str, float]
    """The best objective of the plans that fit, by kind."""
    seconds: float

    @property
    def score(self) -> float:
        """The best objective of all; infinite if no plan fits."""
        return min(self.scores.values(), default=math.inf)

    def is_above(self, answer: Answer, seed: int) -> None:
        """Assert that the bounds of an answer hold."""
        assert answer.lower_bound <= self.score * (1 + 1e-9), seed
        assert answer.lower_bound_s <= self.seconds * (1 + 1e-9), seed

    def is_above_bound(self, case: SmallCase, tables: StageTimeTables, seed: int) -> None:
        """Assert that the bound by itself holds with worse plans known.

        A search to the end does not need it.
        """
        job = case.job
        sizes = [b for b in (1, 2, 4) if job.global_batch % b == 0]
        bound = EventBound(
            tables, tables.lots, (), Limits(job.objective), job.global_batch, sizes
        ).bounds(2 * self.seconds, 2 * self.score)
        assert bound.seconds <= self.seconds, seed
        assert bound.objective <= self.score, seed


def least_of(
    case: SmallCase,
    judge: EventEstimator,
    plans: Iterable[Plan],
    kind: Callable[[Plan], str] = lambda _: "",
) -> Least:
    """Judge the plans of a case that are possible."""
    scores, seconds = defaultdict[str, float](lambda: math.inf), math.inf
    for plan in plans:
        if not is_possible(case, plan):
            continue
        estimate = judge.estimate(plan)
        usd = estimate.money.total_usd
        assert usd is not None
        if estimate.fits:
            score = usd if case.job.objective.goal == "cost" else estimate.iteration_s
            scores[kind(plan)] = min(scores[kind(plan)], score)
            seconds = min(seconds, estimate.iteration_s)
    return Least(scores, seconds)
