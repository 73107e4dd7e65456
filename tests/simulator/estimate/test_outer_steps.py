"""Outer steps: an iteration is one of groups alone, and a share of an outer step."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from simulator.estimate.gradient_sync import MASTER_BYTES, SyncJobs
from simulator.estimate.machine_layout import lay_out
from simulator.estimate.memory import OUTER_BYTES, MemoryModel
from simulator.estimate.outer_steps import LOSS_NOTE
from simulator.hardware.runtime_constants import platform_of
from simulator.spec.plan import Pipeline, Plan, linked_by_zones
from tests.simulator import oracle
from tests.simulator.estimate.test_estimator_oracle import judged_iteration_s, optimizer_s
from tests.simulator.estimate.test_gradient_sync import (
    EAST,
    EFFICIENCY,
    RATE,
    WEST,
    across_zones,
    wires,
    world,
)
from tests.simulator.worlds import ZONES, World, random_plan, random_world


def in_zone(pipeline: Pipeline, zone: str) -> Pipeline:
    """The pipeline with all its places in one zone."""
    stages = (
        replace(stage, places=tuple(replace(where, zone=zone) for where in stage.places))
        for stage in pipeline.stages
    )
    return replace(pipeline, stages=tuple(stages))


def random_grouped(
    rng: random.Random, world: World, every: int, **asked: Any
) -> tuple[Plan, list[list[int]]]:
    """A plan with outer steps whose pipelines are in one zone each, and its groups."""
    plan = random_plan(rng, world, most_pipelines=6, **asked)
    zones = rng.sample(ZONES, rng.randint(2, 3))
    more = plan.pipelines[:1] if len(plan.pipelines) == 1 else ()
    pipelines = [*plan.pipelines, *more]
    homes = [*zones[: len(pipelines)], *(rng.choice(zones) for _ in pipelines[len(zones) :])]
    rng.shuffle(homes)
    placed = tuple(in_zone(*each) for each in zip(pipelines, homes, strict=True))
    groups = [[p for p, home in enumerate(homes) if home == zone] for zone in dict.fromkeys(homes)]
    return replace(plan, pipelines=placed, outer_every=every), groups


def alone(plan: Plan, group: list[int]) -> Plan:
    return replace(plan, pipelines=tuple(plan.pipelines[p] for p in group), outer_every=None)


def outer_step_s(world: World, plan: Plan) -> float:
    """All layers summed in fp32 after all passes, then an update of all that a group holds."""
    plain = replace(plan, outer_every=None)
    layout = lay_out(plain, world.estimator.facts.machines)
    sync = SyncJobs(plain, layout, world.costs, world.network, of_weights=True)
    groups = layout.groups
    names = [str(groups.ids[row]) for row in groups.owner.tolist()]
    owner = dict(zip(groups.ids, names, strict=True))
    # Each group updates all that it holds, whatever ZeRO says.
    whole_job = replace(world, job=replace(world.job, zero=0))
    update = optimizer_s(whole_job, plain, set(names))
    jobs = [
        oracle.SyncJob(job.seconds, {owner[group]: 0.0 for group in job.holders})
        for job in sync.jobs(per_layer=False)
    ]
    free = dict.fromkeys(update, 0.0)
    return oracle.simulate_sync(free, jobs, optimizer_s=update, mode="serial").iteration_s


def besides_s(plan: Plan) -> float:
    places = {where for p in plan.pipelines for s in p.stages for where in s.places}
    return max(platform_of(where.gpu).iteration_s for where in places)


@pytest.mark.sim
def test_an_iteration_is_that_of_the_slowest_group_and_a_share_of_an_outer_step(
    examples: int,
) -> None:
    several = 0
    for case in range(examples):
        rng = random.Random(f"outer steps {case}")
        world, every = random_world(rng), rng.choice([1, 2, 7, 50])
        plan, groups = random_grouped(rng, world, every)
        assert [list(group) for group in plan.outer_groups] == sorted(groups)
        # What an iteration takes beside passes and sums depends on all kinds of GPUs.
        slowest = besides_s(plan) + max(
            judged_iteration_s(world, own) - besides_s(own)
            for own in (alone(plan, group) for group in groups)
        )
        estimate = world.estimator.estimate(plan)
        inner = estimate.iteration_s - outer_step_s(world, plan) / every
        assert inner == pytest.approx(slowest, rel=1e-9), (case, plan)
        several += max(map(len, groups)) > 1
        for row, times in zip(plan.pipelines, estimate.stages, strict=True):
            assert len(times) == len(plan.owning_stages(row))
            for one in times:
                parts = one.compute_s + one.communication_s + one.optimizer_s + one.idle_s
                assert parts == pytest.approx(estimate.iteration_s)
                assert one.idle_s > -1e-9
    assert several >= examples // 3


@pytest.mark.sim
def test_dollars_and_bytes_are_those_of_the_groups_and_a_share_of_the_outer_sums(
    examples: int,
) -> None:
    for case in range(examples):
        rng = random.Random(f"outer bytes {case}")
        world, every = random_world(rng), rng.choice([1, 3, 20])
        plan, groups = random_grouped(rng, world, every)
        expected: dict[tuple[str, str], float] = {}
        for group in groups:
            for way, size in world.estimator.bytes_between_zones(alone(plan, group)).items():
                expected[way] = expected.get(way, 0.0) + size
        assert expected == {}, "each group has one zone"
        plain = replace(plan, outer_every=None)
        layout = lay_out(plain, world.estimator.facts.machines)
        sync = SyncJobs(plain, layout, world.costs, world.network, of_weights=True)
        for job in sync.jobs(per_layer=False):
            for way, size in job.egress_bytes:
                expected[way] = expected.get(way, 0.0) + size / every
        found = world.estimator.bytes_between_zones(plan)
        assert found == pytest.approx(expected, rel=1e-9)
        money = world.estimator.estimate(plan).money
        usd = sum(size * world.network.egress_usd_per_byte(*way) for way, size in expected.items())
        assert money.egress_usd == pytest.approx(usd, rel=1e-9)


@pytest.mark.sim
def test_memory_is_that_of_the_group_alone_and_the_state_of_outer_steps(examples: int) -> None:
    """Shared moments are divided among the pipelines of a group, not among all."""
    shared = 0
    for case in range(examples):
        rng = random.Random(f"outer memory {case}")
        world = random_world(rng)
        plan, groups = random_grouped(rng, world, 50)
        memory = world.estimator.estimate(plan).memory
        capacity = world.estimator.facts.capacity_bytes
        both = MemoryModel(replace(plan, outer_every=None), world.costs, capacity).pipelines()
        for group in groups:
            own = MemoryModel(alone(plan, group), world.costs, capacity).pipelines()
            for p, row in zip(group, own, strict=True):
                for s, (found, without) in enumerate(zip(memory[p], row, strict=True)):
                    # Each parameter has a gradient of four bytes.
                    more = OUTER_BYTES * without.gradients / 4
                    assert found.optimizer == pytest.approx(without.optimizer + more)
                    # An outer step needs the buffers of sums, though the group may have none.
                    assert found.communication == both[p][s].communication
                    same = ("parameters", "gradients", "activations", "workspace", "context")
                    assert all(getattr(found, n) == getattr(without, n) for n in same)
        shared += world.job.zero
    assert shared


# By hand -----------------------------------------------------------------------------------------


def test_an_outer_step_by_hand() -> None:
    """One replica in each of two zones: each sends half of the fp32 weights twice."""
    here = world(wires(across=RATE / 10))
    plain = across_zones(1, EAST, WEST)
    parameters = float(here.costs.parameters(1).sum()) - here.costs.tied_parameters(1)
    sum_s = 2 * 1 / 2 * MASTER_BYTES * parameters / (RATE / 10) / EFFICIENCY
    update_s = parameters * optimizer_s_each(here)
    estimates = {
        every: here.estimator.estimate(replace(plain, outer_every=every))
        for every in (1, 10, 10**6)
    }
    one = here.estimator.estimate(replace(plain, pipelines=plain.pipelines[:1]))
    for every, estimate in estimates.items():
        by_hand = one.iteration_s + (sum_s + update_s) / every
        assert estimate.iteration_s == pytest.approx(by_hand, rel=1e-9)
        assert estimate.notes[-1] == LOSS_NOTE
    egress = [one.money.egress_usd * every for every, one in estimates.items()]
    assert egress == pytest.approx([egress[0]] * 3)


def test_outer_steps_after_each_iteration_cost_an_ordinary_sum_and_their_update() -> None:
    here = world(wires(across=RATE / 10))
    plain = across_zones(1, EAST, WEST)
    assert here.costs.gradient_bytes == MASTER_BYTES
    parameters = float(here.costs.parameters(1).sum()) - here.costs.tied_parameters(1)
    usual, outer = (here.estimator.estimate(replace(plain, outer_every=n)) for n in (None, 1))
    update_s = parameters * optimizer_s_each(here)
    # Nothing overlaps with an outer sum, and the usual one begins during the last backward.
    hidden = outer.iteration_s - update_s - usual.iteration_s
    backward = here.costs.times(plain.pipelines[0].stages[0].place.gpu, tp=1, samples=1).backward
    assert -1e-12 <= hidden <= float(backward.sum())
    assert outer.money.egress_usd == pytest.approx(usual.money.egress_usd)


def optimizer_s_each(here: World) -> float:
    times = here.costs.times(GPU, tp=1, samples=across_zones(1, EAST).micro_batch_size)
    return float(times.optimizer_s_per_parameter)


GPU = across_zones(1, EAST).pipelines[0].stages[0].place.gpu


# Groups ------------------------------------------------------------------------------------------


def test_pipelines_that_share_a_zone_are_one_group_also_through_others() -> None:
    assert linked_by_zones([{"a"}, {"b"}, {"a"}]) == ((0, 2), (1,))
    assert linked_by_zones([{"a"}, {"b"}, {"c"}, {"a", "b"}]) == ((0, 1, 3), (2,))
    assert linked_by_zones([{"a", "b"}, {"b", "c"}, {"c", "d"}]) == ((0, 1, 2),)


def test_a_plan_takes_outer_steps_only_where_some_pipelines_share_no_zone() -> None:
    apart, beside = across_zones(2, EAST, WEST), across_zones(2, EAST)
    assert apart.with_outer_steps(5).outer_groups == ((0, 1), (2, 3))
    assert beside.with_outer_steps(5) is beside
    assert apart.outer_groups == ((0, 1, 2, 3),)


def test_the_timeline_of_an_iteration_has_the_sums_of_groups() -> None:
    here = world(wires(across=RATE / 10))
    plan = across_zones(2, EAST, WEST).with_outer_steps(5)
    holders = {
        tuple(sorted(p for p, _, _ in job.holders)) for _, job in here.estimator.details(plan).sync
    }
    assert holders == {(0, 1), (2, 3)}
