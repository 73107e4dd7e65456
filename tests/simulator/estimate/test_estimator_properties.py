"""Properties of estimates: relations between worlds that differ in one thing.

A case is named by its seed; ``world_and_plan(seed)`` draws it again.
"""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace

import pytest

from simulator.cluster.place_facts import PlaceFacts
from simulator.estimate.event_estimator import EventEstimator
from simulator.estimate.result import DeviceMemory, Estimate
from simulator.hardware.runtime_constants import platform_of
from simulator.hardware.types import Link
from simulator.network.curves import curve_from_bandwidths
from simulator.network.network import MeasuredNetwork
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan
from tests.simulator.worlds import (
    ZONES,
    World,
    cases,
    even_profile,
    every_pool,
    place,
    placed,
    random_plan,
    random_world,
    recomputed_layers,
    small_model,
    stage,
    with_links,
    with_shares,
    world_and_plan,
    world_of,
)

ROUNDING = 1e-12


def numbers(estimate: Estimate) -> list[float]:
    """Every number of an estimate."""
    found = [estimate.iteration_s, estimate.money.egress_usd, estimate.money.compute_usd or 0.0]
    found += [usd for _, usd in estimate.money.by_pool_usd + estimate.money.by_egress_usd]
    for rows in (estimate.memory, estimate.stages):
        for row in rows:
            for item in row:
                found += [getattr(item, field.name) for field in fields(item)]
    return found


# Numbers -------------------------------------------------------------------------------------


def test_no_number_is_negative_or_nan(examples: int) -> None:
    for seed in cases("numbers", examples):
        _, world, plan = world_and_plan(seed)
        estimate = world.estimator.estimate(plan)
        for number in numbers(estimate):
            assert math.isfinite(number), (seed, estimate)
            assert number >= -1e-9 * estimate.iteration_s, (seed, estimate)
        assert estimate.iteration_s > 0
        assert estimate.throughput_samples_per_s > 0


def test_every_device_group_accounts_for_the_whole_iteration(examples: int) -> None:
    """Computing, messages, the step and idling add up to it, and no group idles less than 0 s."""
    for seed in cases("conservation", examples):
        _, world, plan = world_and_plan(seed)
        estimate = world.estimator.estimate(plan)
        for pipeline, row in zip(plan.pipelines, estimate.stages, strict=True):
            assert len(row) == plan.group_count(pipeline)
            for time in row:
                parts = time.compute_s + time.communication_s + time.optimizer_s + time.idle_s
                assert parts == pytest.approx(estimate.iteration_s, rel=ROUNDING), seed
                assert time.idle_s >= -1e-9 * estimate.iteration_s, (seed, time)


def test_compute_is_the_sum_of_the_layers(examples: int) -> None:
    """Each group's compute: its layers' times, once forward and once back per micro batch."""
    for seed in cases("compute", examples):
        rng = random.Random(seed)
        world = random_world(rng)
        plan = random_plan(rng, world, schedules=("1f1b", "gpipe"), splits=False)
        plan = with_shares(rng, plan)
        estimate = world.estimator.estimate(plan)
        for pipeline, row in zip(plan.pipelines, estimate.stages, strict=True):
            for s, (one, time) in enumerate(zip(pipeline.stages, row, strict=True)):
                times = world.costs.times(one.place.gpu, tp=one.tp, samples=plan.micro_batch_size)
                seconds = sum(times.forward[i] + times.backward[i] for i in range(*one.layers))
                seconds += sum(times.forward[i] for i in recomputed_layers(world, one))
                if s == 0:
                    seconds += platform_of(one.place.gpu).load_s
                expected = pipeline.micro_batches * seconds
                assert time.compute_s == pytest.approx(expected, rel=1e-9), seed


def test_estimates_do_not_depend_on_earlier_ones(examples: int) -> None:
    """Tables are shared between the plans of a job: an estimator without any says the same."""
    for seed in cases("before", examples // 5):
        rng = random.Random(seed)
        world = random_world(rng)
        plans = [random_plan(rng, world) for _ in range(8)]
        plans += [replace(plan, micro_batch_size=4) for plan in plans]
        for plan in plans:
            fresh = world_of(
                world.job,
                measured=world.measured,
                profile=world.profile,
                zone_caps=dict(world.network.zone_caps),
            )
            assert world.estimator.estimate(plan) == fresh.estimator.estimate(plan), seed


# Order and names -----------------------------------------------------------------------------


def renamed(plan: Plan, names: dict[str, str]) -> Plan:
    def at(where: Place) -> Place:
        assert where.node is not None
        return replace(where, node=names[where.node])

    return replace(
        plan,
        pipelines=tuple(
            replace(
                pipeline,
                stages=tuple(
                    replace(one, places=tuple(at(where) for where in one.places))
                    for one in pipeline.stages
                ),
            )
            for pipeline in plan.pipelines
        ),
    )


def assert_same(one: Estimate, other: Estimate, seed: str) -> None:
    assert other.iteration_s == pytest.approx(one.iteration_s, rel=ROUNDING), seed
    assert other.money.total_usd == pytest.approx(one.money.total_usd, rel=1e-9), seed
    assert dict(other.money.by_egress_usd) == pytest.approx(
        dict(one.money.by_egress_usd), rel=1e-9
    ), seed


@pytest.mark.sim
def test_estimates_do_not_depend_on_the_order_of_pipelines(examples: int) -> None:
    """Except under ZeRO-1, where it decides between holders that own equally little."""
    for seed in cases("order", examples):
        rng, world, plan = world_and_plan(seed)
        if world.job.zero == 1 and world.costs.runtime.zero1_by_bucket:
            continue
        for one in (plan, placed(plan)):
            before = world.estimator.estimate(one)
            order = rng.sample(range(len(one.pipelines)), len(one.pipelines))
            shuffled = replace(one, pipelines=tuple(one.pipelines[p] for p in order))
            after = world.estimator.estimate(shuffled)
            assert_same(before, after, seed)
            for new, old in enumerate(order):
                assert after.memory[new] == before.memory[old], seed
                for mine, theirs in zip(after.stages[new], before.stages[old], strict=True):
                    assert mine.compute_s == theirs.compute_s, seed


@pytest.mark.sim
def test_estimates_do_not_depend_on_node_names(examples: int) -> None:
    for seed in cases("names", examples):
        rng, world, plan = world_and_plan(seed)
        plan = placed(plan)
        nodes = sorted(
            {
                str(where.node)
                for pipeline in plan.pipelines
                for one in pipeline.stages
                for where in one.places
            }
        )
        names = dict(zip(nodes, rng.sample([f"n{i}" for i in range(99)], len(nodes)), strict=True))
        before = world.estimator.estimate(plan)
        assert_same(before, world.estimator.estimate(renamed(plan, names)), seed)


def test_ring_order_does_not_depend_on_node_names() -> None:
    """Four replicas of TP 1, 4, 1 and 4, the second on a machine that carries two stages.

    Once a ring stood in the order of the machines' names, so that a name said whether the two
    of TP 4 were neighbours; their four flows carry more than one flow does.
    """
    end = ("us-central1-a", "V100-16")
    wire = curve_from_bandwidths(1, sizes_bytes=(1.0, 1e9), bytes_per_s=(1e6, 1e6))
    measured = MeasuredNetwork(between={(end, end): {1: wire}})
    world = world_of(replace_job(max_tp=4, gradient_sync="serial"), measured=measured)
    layers = len(world.job.model.layers)

    def plan(names: list[str]) -> Plan:
        pipelines = []
        for number, (name, tp) in enumerate(zip(names, [1, 4, 1, 4], strict=True)):
            crowded = name if number == 1 else f"{name}-own"
            pipelines.append(
                Pipeline(
                    2,
                    (
                        stage(0, 2, place(node=name), tp=tp),
                        stage(2, layers, place(node=crowded), tp=tp),
                    ),
                )
            )
        return Plan(1, tuple(pipelines))

    seconds = {
        world.estimator.estimate(plan(names)).iteration_s
        for names in (["a", "b", "c", "d"], ["a", "d", "b", "c"], ["d", "a", "c", "b"])
    }
    assert max(seconds) == pytest.approx(min(seconds), rel=ROUNDING)


def replace_job(**changes: object) -> Job:
    fixed = {"name": "fixed", "model": small_model(), "global_batch": 8, "sequence": 128}
    return Job(**{**fixed, **changes})  # type: ignore[arg-type]  # a test's shorthand


# More of something ---------------------------------------------------------------------------


@pytest.mark.sim
def test_one_more_micro_batch_never_shortens_an_iteration(examples: int) -> None:
    for seed in cases("micro batch", examples):
        rng, world, plan = world_and_plan(seed)
        p = rng.randrange(len(plan.pipelines))
        pipeline = plan.pipelines[p]
        # The interleaved schedule takes them in rounds.
        step = plan.group_count(pipeline) if plan.schedule == "interleaved" else 1
        if plan.schedule == "interleaved" and pipeline.micro_batches == step:
            continue  # With one round Megatron's order is another one: all forwards first.
        more = replace(pipeline, micro_batches=pipeline.micro_batches + step)
        longer = replace(plan, pipelines=(*plan.pipelines[:p], more, *plan.pipelines[p + 1 :]))
        before = world.estimator.estimate(plan).iteration_s
        assert world.estimator.estimate(longer).iteration_s >= before * (1 - ROUNDING), seed


@pytest.mark.sim
def test_recomputation_is_never_faster_and_never_keeps_more(examples: int) -> None:
    slower = 0
    for seed in cases("recompute", examples):
        _, world, plan = world_and_plan(seed)
        kept, recomputed = (
            world.estimator.estimate(
                replace(
                    plan,
                    pipelines=tuple(
                        replace(
                            pipeline,
                            stages=tuple(replace(one, recompute=policy) for one in pipeline.stages),
                        )
                        for pipeline in plan.pipelines
                    ),
                )
            )
            for policy in ("none", "full")
        )
        assert recomputed.iteration_s >= kept.iteration_s * (1 - ROUNDING), seed
        slower += recomputed.iteration_s > kept.iteration_s
        for one, other in zip(sum(kept.memory, ()), sum(recomputed.memory, ()), strict=True):
            assert other.activations <= one.activations * (1 + ROUNDING), seed
    assert slower > examples // 2


# Money ---------------------------------------------------------------------------------------


def test_costs_add_up(examples: int) -> None:
    crossing = 0
    for seed in cases("money", examples):
        _, world, plan = world_and_plan(seed)
        estimate = world.estimator.estimate(plan)
        money = estimate.money
        assert money.compute_usd is not None
        assert money.total_usd == money.compute_usd + money.egress_usd
        assert money.compute_usd == pytest.approx(sum(usd for _, usd in money.by_pool_usd))
        assert money.egress_usd == pytest.approx(sum(usd for _, usd in money.by_egress_usd))
        crossing += money.egress_usd > 0
        facts = PlaceFacts(world.cluster, world.measured)
        per_hour = 0.0
        for pipeline in plan.pipelines:
            for one in pipeline.stages[: plan.group_count(pipeline)]:
                for where in one.places:
                    usd = facts.price_usd_per_gpu_hour(where)
                    assert usd is not None
                    per_hour += one.tp * usd
        assert money.compute_usd == pytest.approx(per_hour / 3600 * estimate.iteration_s)
        assert set(dict(money.by_pool_usd)) == set(plan.gpus_used())
    assert crossing > examples // 4


def test_higher_egress_prices_raise_cost_and_not_time(examples: int) -> None:
    for seed in cases("egress", examples):
        rng, world, plan = world_and_plan(seed)
        pairs = [(a, b) for a in ZONES for b in ZONES if a != b]
        prices = {pair: rng.uniform(0, 1e-10) for pair in pairs}
        dearer = {pair: usd + rng.choice([0, 1e-10]) for pair, usd in prices.items()}
        one, other = (
            EventEstimator(
                world.costs,
                replace(world.network, measured=replace(world.measured, egress_usd_per_byte=table)),
                PlaceFacts(world.cluster, world.measured),
            ).estimate(plan)
            for table in (prices, dearer)
        )
        assert other.money.egress_usd >= one.money.egress_usd, seed
        assert other.iteration_s == one.iteration_s, seed
        assert other.money.compute_usd == one.money.compute_usd, seed


def test_pool_without_a_price_is_named_and_not_free() -> None:
    cluster = every_pool()
    unknown = replace(
        cluster,
        pools=tuple(
            replace(pool, price_usd_per_gpu_hour=None, price_source="unknown")
            if pool.gpu == "T4"
            else pool
            for pool in cluster.pools
        ),
    )
    world = world_of(replace_job(), cluster=unknown)
    layers = len(world.job.model.layers)
    plan = Plan(1, (Pipeline(8, (stage(0, 2, place("V100-16")), stage(2, layers, place("T4")))),))
    money = world.estimator.estimate(plan).money
    assert money.compute_usd is None
    assert money.total_usd is None
    assert money.unpriced == ("T4@us-central1-a",)
    assert dict(money.by_pool_usd)["V100-16@us-central1-a"] > 0


# Memory --------------------------------------------------------------------------------------


def memory_of(world: World, plan: Plan) -> list[DeviceMemory]:
    return list(sum(world.estimator.estimate(plan).memory, ()))


def test_memory_never_falls_with_the_micro_batch(examples: int) -> None:
    for seed in cases("memory size", examples):
        _, world, plan = world_and_plan(seed)
        twice = replace(plan, micro_batch_size=2 * plan.micro_batch_size)
        for one, other in zip(memory_of(world, plan), memory_of(world, twice), strict=True):
            for field in fields(one):
                mine, theirs = getattr(one, field.name), getattr(other, field.name)
                assert theirs >= mine * (1 - ROUNDING), (seed, field.name)
            assert other.total > one.total, seed


def test_memory_never_falls_with_the_micro_batches_in_flight(examples: int) -> None:
    for seed in cases("memory flight", examples):
        rng = random.Random(seed)
        world = random_world(rng)
        plan = random_plan(rng, world, schedules=("1f1b", "gpipe"))
        more = replace(
            plan,
            pipelines=tuple(replace(p, micro_batches=p.micro_batches + 1) for p in plan.pipelines),
        )
        for one, other in zip(memory_of(world, plan), memory_of(world, more), strict=True):
            assert other.activations >= one.activations, seed
            assert other.total >= one.total, seed


def test_memory_never_falls_with_the_layers_held(examples: int) -> None:
    """A stage that takes a layer from the next one keeps all that it had.

    Buffers for the tensors at its ends are left out: they follow the new boundary, whose tensor
    may be smaller, and vanish with the last layer.
    """
    for seed in cases("memory layers", examples):
        rng = random.Random(seed)
        world = random_world(rng)
        layers = len(world.job.model.layers)
        first = rng.randint(1, layers - 1)
        end = rng.randint(first, layers - 1)
        head = [stage(0, first, place())]
        tp = rng.choice([1, 2, 4])

        if end == first:
            continue
        plans = []
        for last in (end, end + 1):
            tail = [stage(last, layers, place())] if last < layers else []
            # One micro batch, so that the depth behind does not matter.
            plans.append(
                Plan(1, (Pipeline(1, (*head, stage(first, last, place(), tp=tp), *tail)),))
            )
        small, large = (memory_of(world, plan)[1] for plan in plans)
        for name in ("parameters", "gradients", "optimizer", "workspace"):
            assert getattr(large, name) >= getattr(small, name), (seed, name)
        # The tensor that is kept for the next stage follows the boundary too.
        if not world.costs.runtime.keeps_stage_outputs:
            assert large.activations >= small.activations, seed


def test_zero1_never_needs_more_memory_nor_a_longer_step_without_broadcasts(examples: int) -> None:
    """Except that by curves one large message may be slower than several, and that a sum for one
    rank is not staged over zones.
    """
    less = compared = 0
    for seed in cases("zero", examples):
        _, world, plan = world_and_plan(seed)
        whole, sharded = (
            world_of(
                replace(world.job, zero=zero),
                measured=world.measured,
                profile=world.profile,
                zone_caps=dict(world.network.zone_caps),
            )
            for zero in (0, 1)
        )
        for one, other in zip(memory_of(whole, plan), memory_of(sharded, plan), strict=True):
            assert other.optimizer <= one.optimizer * (1 + ROUNDING), seed
            assert replace(other, optimizer=0.0) == replace(one, optimizer=0.0), seed
            less += other.optimizer < one.optimizer
        before, after = (each.estimator.details(plan) for each in (whole, sharded))
        is_measured = bool(world.measured.between or world.measured.within)
        zones = {one.zone for p in plan.pipelines for s in p.stages for one in s.places}
        if sharded.costs.has_owners and (is_measured or len(zones) > 1):
            continue
        compared += 1
        for group, end in after.step_end.items():
            assert end <= before.step_end[group] * (1 + ROUNDING), seed
    assert less > examples
    assert compared > examples / 5


# Equal pipelines -----------------------------------------------------------------------------


def test_equal_pipelines_take_as_long_as_one_without_sync_costs(examples: int) -> None:
    """Infinitely fast links: each of many equal pipelines takes what one takes alone."""
    for seed in cases("collapse", examples):
        rng = random.Random(seed)
        drawn = random_world(rng)

        def boundless(link: Link) -> Link:
            return replace(
                link,
                latency_s=0.0,
                flow_bytes_per_s=1e30,
                aggregate_bytes_per_s=1e30,
                ring_bytes_per_s=1e30,
                step_s=0.0,
            )

        links = with_links(
            drawn.cluster.catalogue,
            boundless,
            lambda reach: replace(
                reach, latency_s=0.0, flow_bytes_per_s=None, aggregate_bytes_per_s=None
            ),
        )
        world = world_of(
            replace(drawn.job, zero=0),
            cluster=every_pool(links),
            measured=MeasuredNetwork(),
            profile=drawn.profile,
            zone_caps={},
        )
        plan = random_plan(rng, world, most_pipelines=1)
        alone = world.estimator.estimate(plan)
        many = world.estimator.estimate(replace(plan, pipelines=plan.pipelines * 3))
        assert many.iteration_s == pytest.approx(alone.iteration_s, rel=1e-9), seed
        assert many.stages[0] == many.stages[1] == many.stages[2]
        for one, other in zip(many.stages[0], alone.stages[0], strict=True):
            assert one.compute_s == other.compute_s, seed
        assert many.throughput_samples_per_s == pytest.approx(3 * alone.throughput_samples_per_s)


def test_straggler_delays_its_pipeline_and_the_sync() -> None:
    """A slow stage delays no stage of another pipeline, but their sums and so the iteration."""
    job = replace_job(gradient_sync="serial")
    profile = even_profile(job, {"A100-40": 0.01, "T4": 0.04})
    world = world_of(job, profile=profile)
    layers = len(job.model.layers)
    quick = Pipeline(8, (stage(0, 3, place("A100-40")), stage(3, layers, place("A100-40"))))
    slow = Pipeline(8, (stage(0, 3, place("A100-40")), stage(3, layers, place("T4"))))
    twins = world.estimator.estimate(Plan(1, (quick, quick)))
    mixed = world.estimator.estimate(Plan(1, (quick, slow)))
    # The slow stage works on eight micro batches all the time, once the first is there.
    assert mixed.iteration_s > 8 * 3 * (layers - 3) * 0.04 > twins.iteration_s
    assert mixed.stages[0][0].compute_s == twins.stages[0][0].compute_s
    assert mixed.stages[0][0].idle_s > twins.stages[0][0].idle_s
