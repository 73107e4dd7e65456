"""The bound of the full space against random plans in random worlds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner.problem.inventory import lots_of
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.models.families import build_model
from simulator.spec.job import Goal, Job
from simulator.spec.plan import Pipeline, Plan, Stage
from tests.planner.search.tight_plans import bound_of, keeps_bound, tables_of
from tests.simulator.worlds import random_plan, random_world, world_of


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("goal", ["throughput", "cost"])
def test_no_plan_is_below_the_bound(goal: Goal, examples: int) -> None:
    for seed in range(max(1, examples // 10)):
        rng = random.Random(f"bound {goal} {seed}")
        world = random_world(rng)
        plan = random_plan(rng, world, schedules=("1f1b",), splits=False)
        if rng.random() < 0.5:
            # Equal pipelines come closest to the bound.
            plan = replace(plan, pipelines=(plan.pipelines[0],) * len(plan.pipelines))
        keeps_bound(rng, world, plan, goal, tables_of, seed)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_single_stage_sums_no_tied_embedding(precision: str) -> None:
    """A plan on one GPU sums nothing, although the bound knows of two."""
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
    lots = lots_of(world.cluster, world.estimator.facts)
    bounds = bound_of(world, alone, tables_of(world.estimator, lots), "cost").bounds(
        2 * estimate.iteration_s, 2 * usd
    )
    assert bounds.objective <= usd


def test_pipelines_of_several_stages_sum_a_tied_embedding_at_both_ends() -> None:
    """Where no GPU holds the model, P pipelines have 2 P groups with the embedding or the head."""
    pool = Pool("us-central1-a", "T4", "T4x1", 1, 8, price_usd_per_gpu_hour=1.0, price_source="x")
    tied = build_model(
        "gpt2", layers=4, hidden=4096, heads=32, vocab=50_257, sequence=64, tied=True
    )
    job = Job("tied", tied, 8, 64, precision="fp32", optimizer="adam", max_tp=1)
    world = world_of(job, cluster=Cluster((pool,), load_catalogue()))
    layers = len(tied.layers)
    halves = (
        Stage((0, layers // 2), 1, (pool.place,)),
        Stage((layers // 2, layers), 1, (pool.place,)),
    )
    plan = Plan(1, (Pipeline(2, halves),) * 4)
    estimate = world.estimator.estimate(plan)
    assert estimate.fits
    tables = tables_of(world.estimator, lots_of(world.cluster, world.estimator.facts), "none", (1,))
    assert tables.end_s(1, 4, 4) > tables.sync.tied_s("T4", 1, 8, 8)
    bound = bound_of(world, plan, tables, "throughput").bounds(*[2 * estimate.iteration_s] * 2)
    assert bound.seconds <= estimate.iteration_s


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
    lots = lots_of(world.cluster, world.estimator.facts)
    bounds = bound_of(world, plan, tables_of(world.estimator, lots), "cost").bounds(
        2 * estimate.iteration_s, 2 * usd
    )
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
    lots = lots_of(world.cluster, world.estimator.facts)
    bound = bound_of(world, plan, tables_of(world.estimator, lots), "throughput")
    assert bound.least(10.0, 10.0, is_cost=False, trips=False) <= estimate.iteration_s
