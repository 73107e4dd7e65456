"""Pipelines with micro batch sizes of their own, beside plans with one size."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from simulator.estimate.difference import difference_error
from simulator.spec.plan import Pipeline, Plan, with_sizes
from tests.simulator.worlds import World, cases, random_plan, random_world, with_shares


def drawn(seed: str) -> tuple[random.Random, World, Plan]:
    rng = random.Random(seed)
    world = random_world(rng)
    plan = with_shares(rng, random_plan(rng, world))
    return rng, world, replace(plan, together=rng.choice([None, 1, 2]))


def stating(plan: Plan, sizes: list[int]) -> Plan:
    """The plan whose pipelines state these sizes, though it is not how plans are written."""
    pairs = zip(plan.pipelines, sizes, strict=True)
    pipelines = tuple(replace(pipeline, micro_batch_size=size) for pipeline, size in pairs)
    return replace(plan, micro_batch_size=7, pipelines=pipelines)


def test_stated_sizes_that_are_alike_are_the_plans_size(examples: int) -> None:
    for seed in cases("alike", examples):
        _, world, plan = drawn(seed)
        stated = stating(plan, [plan.micro_batch_size] * len(plan.pipelines))
        assert stated != plan
        assert world.estimator.estimate(stated) == world.estimator.estimate(plan), seed


def test_each_pipeline_computes_and_holds_what_it_would_if_all_had_its_size(
    examples: int,
) -> None:
    for seed in cases("own sizes", examples):
        rng, world, plan = drawn(seed)
        plan = replace(plan, schedule="1f1b", virtual_stages=1)
        if any(len(s.places) > 1 for p in plan.pipelines for s in p.stages):
            continue
        sizes = [rng.choice([1, 2, 4]) for _ in plan.pipelines]
        found = world.estimator.estimate(with_sizes(plan, sizes))
        for size in set(sizes):
            alone = world.estimator.estimate(with_sizes(plan, [size] * len(sizes)))
            for p in (p for p, its in enumerate(sizes) if its == size):
                assert found.memory[p] == alone.memory[p], seed
                for one, other in zip(found.stages[p], alone.stages[p], strict=True):
                    assert one.compute_s == other.compute_s, seed
        samples = sum(n.micro_batches * s for n, s in zip(plan.pipelines, sizes, strict=True))
        assert found.samples_per_iteration == samples


def test_pipelines_that_differ_in_size_alone_may_be_written_in_any_order(examples: int) -> None:
    for seed in cases("sizes in any order", examples):
        rng, world, plan = drawn(seed)
        plan = replace(plan, schedule="1f1b", virtual_stages=1)
        first = plan.pipelines[0]
        if world.job.zero == 1 or any(len(stage.places) > 1 for stage in first.stages):
            continue
        sizes = rng.choices([1, 2, 4], k=4)
        plan = replace(plan, pipelines=(first,) * 4)
        seconds = {
            round(world.estimator.estimate(with_sizes(plan, list(order))).iteration_s, 12)
            for order in set(itertools.permutations(sizes))
        }
        assert len(seconds) == 1, seed


def test_sizes_are_written_in_one_way() -> None:
    one, other = Pipeline(3, ()), Pipeline(5, ())
    plan = with_sizes(Plan(8, (one, other, one)), [2, 4, 2])
    assert plan == Plan(2, (one, replace(other, micro_batch_size=4), one))
    assert plan.pipelines[0] is plan.pipelines[2]
    assert with_sizes(stating(plan, [2, 4, 2]), [2, 4, 2]) == plan
    assert with_sizes(Plan(8, (one, other)), [4, 2]).micro_batch_size == 2
    assert with_sizes(plan, plan.size_by_pipeline) is plan
    assert plan.samples_per_iteration == 3 * 2 + 5 * 4 + 3 * 2
    assert plan.sizes == (2, 4)


def test_error_bar_of_a_difference_counts_the_samples_in_other_sizes() -> None:
    _, _, plan = drawn("error bars")
    pair = replace(plan, micro_batch_size=2, pipelines=plan.pipelines[:1] * 2)
    same = difference_error(pair, pair)
    half = difference_error(pair, with_sizes(pair, [2, 4]))
    assert same < half < difference_error(pair, with_sizes(pair, [4, 4]))
