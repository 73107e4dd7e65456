"""The bound of the full space against random plans in random worlds."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from planner.pipelines.pipeline_template import TemplateMaker
from planner.problem.inventory import Lot, lots_of
from planner.problem.objective import Limits
from planner.search.bound import EventBound
from planner.search.stage_limits import StageTimeTables
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.models.families import build_model
from simulator.spec.job import Job, Objective, RecomputePolicy
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from tests.planner.search.tight_plans import any_recomputation, just_fitting
from tests.simulator.worlds import (
    GPUS_PER_MACHINE,
    World,
    placed,
    random_plan,
    random_world,
    world_of,
)


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


def bound_of(
    plan: Plan, world: World, lots: tuple[Lot, ...], goal: str, policy: RecomputePolicy = "auto"
) -> EventBound:
    """The bound over all plans of the plan's micro batch size on these GPUs."""
    judge = world.estimator
    tables = StageTimeTables(
        TemplateMaker(judge.costs, judge.network, judge.sites, lots),
        lots,
        degrees=(1, 2, 4),
        recompute=policy,
        per_layer_sync=judge.overlaps,
    )
    objective = Objective(goal=goal)  # type: ignore[arg-type]  # a literal
    sizes = [plan.micro_batch_size]
    limits = Limits(objective)
    return EventBound(tables, lots, (), limits, plan.samples_per_iteration, sizes, gap=1e-9)


def placed_somehow(plan: Plan, rng: random.Random) -> Plan:
    """The plan with a random placement: by rule, some pipelines together, or on named nodes."""
    if rng.random() < 0.3:
        return placed(plan)
    return replace(plan, together=rng.choice([None, 1, 1, 2]))


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("goal", ["throughput", "cost"])
def test_no_plan_is_below_the_bound(goal: str, examples: int) -> None:
    for seed in range(max(1, examples // 10)):
        rng = random.Random(f"bound {goal} {seed}")
        world = random_world(rng)
        plan = random_plan(rng, world, schedules=("1f1b",), splits=False)
        if rng.random() < 0.5:
            # Equal pipelines come closest to the bound.
            plan = replace(plan, pipelines=(plan.pipelines[0],) * len(plan.pipelines))
        plan, policy = any_recomputation(rng, plan)
        lots = lots_of(just_enough(plan, world), world.estimator.sites)
        plan = placed_somehow(plan, rng)
        with just_fitting(rng, world, plan):
            estimate = world.estimator.estimate(plan)
            usd = estimate.money.total_usd
            assert estimate.fits, seed
            assert usd is not None, seed
            score = usd if goal == "cost" else estimate.iteration_s
            bound = bound_of(plan, world, lots, goal, policy)
            bounds = bound.bounds(2 * estimate.iteration_s, 2 * score)
        assert bounds.objective <= score, seed
        assert bounds.seconds <= estimate.iteration_s, seed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_stage_shares_its_tied_embedding_with_none(precision: str) -> None:
    """A plan on one of two machines with one GPU each sums nothing."""
    pool = Pool(
        "us-central1-a", "A100-40", "A100-40x1", 1, 2, price_usd_per_gpu_hour=1.0, price_source="x"
    )
    tied = build_model("gpt2", layers=1, hidden=768, heads=12, vocab=50_257, sequence=64, tied=True)
    job = Job("tied", tied, 1, 64, precision=precision, optimizer="sgd")  # type: ignore[arg-type] # a literal
    world = world_of(job, cluster=Cluster((pool,), load_catalogue()))
    alone = Plan(1, (Pipeline(1, (Stage((0, len(tied.layers)), 1, (pool.place,)),)),))
    estimate = world.estimator.estimate(alone)
    usd = estimate.money.total_usd
    assert usd is not None
    lots = lots_of(world.cluster, world.estimator.sites)
    bounds = bound_of(alone, world, lots, "cost").bounds(2 * estimate.iteration_s, 2 * usd)
    assert bounds.objective <= usd


def test_layers_that_fit_only_with_shared_moments_count() -> None:
    """With goal cost the bound ended where no pipeline alone fits, and was above real plans."""
    pool = Pool(
        "us-central1-a", "V100-16", "V100-16x1", 1, 16, price_usd_per_gpu_hour=1.0, price_source="x"
    )
    wide = build_model("gpt2", layers=2, hidden=8192, heads=64, vocab=1024, sequence=128)
    job = Job(
        "wide", wide, 16, 128,
        precision="fp16", optimizer="adam", zero=1, runtime="megatron-deepspeed",
    )  # fmt: skip
    world = world_of(job, cluster=Cluster((pool,), load_catalogue()))
    halves = tuple(Stage(layers, 1, (pool.place,)) for layers in ((0, 2), (2, 4)))
    plan = Plan(1, (Pipeline(8, halves),) * 2)
    estimate = world.estimator.estimate(plan)
    assert estimate.fits
    usd = estimate.money.total_usd
    assert usd is not None
    lots = lots_of(world.cluster, world.estimator.sites)
    bounds = bound_of(plan, world, lots, "cost").bounds(2 * estimate.iteration_s, 2 * usd)
    assert bounds.objective <= usd


@pytest.mark.parametrize(("whole", "pipelines"), [(0, 4), (4, 8)])
def test_machines_that_lost_gpus_are_not_estimated_as_whole_ones(
    whole: int, pipelines: int
) -> None:
    """Nor does the bound of the GPUs that are left exceed the estimate."""
    pool = Pool(
        "us-central1-a", "A100-40", "a2-highgpu-4g", 4, whole, price_usd_per_gpu_hour=1.0,
        price_source="x",
    )  # fmt: skip
    halves = replace(pool, gpus_per_machine=2, gpus=4)
    model = build_model("gpt2", layers=4, hidden=1024, heads=16, vocab=50_257, sequence=1024)
    job = Job("halves", model, 128, 1024, micro_batches=(16,))
    world = world_of(job, cluster=Cluster((pool, halves), load_catalogue()))

    def on(*nodes: str | None) -> Plan:
        layers = (0, len(model.layers))
        places = (replace(pool.place, node=node) for node in nodes)
        return Plan(
            16, tuple(Pipeline(8 // pipelines, (Stage(layers, 1, (one,)),)) for one in places)
        )

    plan, names = on(*[None] * pipelines), [*"aaaa"[:whole], *"bbcc"]
    estimate = world.estimator.estimate(plan)
    assert estimate.iteration_s == world.estimator.estimate(on(*names)).iteration_s
    lots = lots_of(world.cluster, world.estimator.sites)
    bound = bound_of(plan, world, lots, "throughput")
    assert bound.least(10.0, 10.0, is_cost=False, trips=False) <= estimate.iteration_s
