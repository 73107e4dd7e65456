"""Estimates of whole plans against the oracle.

The estimator supplies only the inputs: seconds of passes, messages and gradient sync. The oracle
computes the schedule, when each layer's gradients are ready, the order of sync and the optimizer
step independently.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from simulator.estimate.device_groups import DeviceGroups
from simulator.estimate.gradient_sync import SyncJobs
from simulator.estimate.machine_layout import GroupId, lay_out
from simulator.estimate.zero1_owners import owned_most
from simulator.hardware.runtime_constants import platform_of
from simulator.spec.plan import Plan
from tests.simulator import oracle
from tests.simulator.estimate.oracle_adapter import Verdict, judge
from tests.simulator.worlds import (
    World,
    random_plan,
    random_world,
    recomputed_layers,
    with_own_sizes,
    with_shares,
)


def judged_iteration_s(world: World, plan: Plan) -> float:
    """The iteration as the oracle sees it."""
    estimator, job = world.estimator, world.job
    layout = lay_out(plan, estimator.facts.machines)
    works = estimator.pipeline_times(plan, layout)
    overlap = job.gradient_sync == "overlap" and job.runtime == "sailor"
    sync = SyncJobs(plan, layout, world.estimator.costs_of(plan), world.network)
    free: dict[str, float] = {}
    end: dict[GroupId, float] = {}
    owner: dict[GroupId, str] = {}
    for p, (pipeline, work) in enumerate(zip(plan.pipelines, works, strict=True)):
        devices = len(pipeline.stages) // plan.virtual_stages
        chain = all(len(one.places) == 1 for one in pipeline.stages)
        messaging = "buffered" if job.runtime == "sailor" else "lockstep"
        if messaging == "lockstep" and not (plan.schedule == "1f1b" and chain):
            messaging = "blocking"
        verdict: Verdict = judge(
            work.times,
            work.edges,
            micro_batches=pipeline.micro_batches,
            schedule=plan.schedule,
            messaging=messaging,
            devices=devices if plan.schedule == "interleaved" else None,
        )
        interleaved = plan.schedule == "interleaved"
        for k, (s, i) in enumerate(work.groups):
            device = s % devices if interleaved else k
            group = (p, s, i)
            owner[group] = str((p, s % devices if interleaved else s, i))
            end[group] = verdict.last_backward[k][1]
            free[owner[group]] = verdict.free[device]
    jobs = []
    for one in sync.jobs(per_layer=overlap):
        ready: dict[str, float] = {}
        for group in one.holders:
            below = (
                0.0
                if one.algorithm == "tied"
                else backward_below_s(world, plan, group, one.layers[0])
            )
            at = end[group] - below
            ready[owner[group]] = max(at, ready.get(owner[group], 0.0))
        jobs.append(oracle.SyncJob(one.seconds, ready))
    result = oracle.simulate_sync(
        free,
        jobs,
        optimizer_s=optimizer_s(world, plan, set(owner.values())),
        mode="overlap" if overlap else "serial",
    )
    if world.job.zero == 1:
        # The owners' weights follow the steps in the order of the sums.
        sent = [one.broadcast for one in sync.jobs(per_layer=overlap) if one.broadcast]
        ready = [{owner[group]: 0.0 for group in one.holders} for one in sent]
        seconds = [one.seconds for one in sent]
        result = oracle.simulate_sync(
            result.step_end_s,
            list(map(oracle.SyncJob, seconds, ready)),
            optimizer_s=dict.fromkeys(result.step_end_s, 0.0),
            mode="serial",
        )
    places = {one for p in plan.pipelines for stage in p.stages for one in stage.places}
    return result.iteration_s + max(platform_of(one.gpu).iteration_s for one in places)


def backward_below_s(world: World, plan: Plan, group: GroupId, layer: int) -> float:
    """What a group's last backward still has to do once it is through with a layer."""
    p, s, i = group
    stage, size = plan.pipelines[p].stages[s], plan.size_of(plan.pipelines[p])
    share = stage.split[i] / sum(stage.split)
    times = world.estimator.costs_of(plan).times(
        stage.places[i].gpu, tp=stage.tp, samples=round(size * share)
    )
    below = 0.0
    if plan.schedule == "zero-bubble":
        # The gradients of weights are computed apart, from the last layer on.
        weight = world.costs.weight_by_layer(
            stage.places[i].gpu, tp=stage.tp, samples=round(size * share)
        )
        return float(sum(weight[stage.layers[0] : layer]))
    for index in range(stage.layers[0], layer):
        below += times.backward[index]
        if index in recomputed_layers(world, stage):
            below += times.forward[index]
    return float(below)


def optimizer_s(world: World, plan: Plan, owners: set[str]) -> dict[str, float]:
    """Each device group's step over what it holds; with ZeRO-1 over its share, or what it owns."""
    layers = len(world.job.model.layers)
    holders = [
        sum(
            len(stage.places)
            for pipeline in plan.pipelines
            for stage in pipeline.stages
            if stage.layers[0] <= layer < stage.layers[1]
        )
        for layer in range(layers)
    ]
    found = dict.fromkeys(owners, 0.0)
    if world.job.zero == 1 and world.estimator.costs_of(plan).runtime.zero1_by_bucket:
        # tests/worker/training/test_zero1.py compares the owners with the runtime's.
        groups = DeviceGroups.of(plan)
        updated = owned_most(groups, world.estimator.costs_of(plan)).updated
        for row in groups.owning.tolist():
            gpu, tp, samples = groups.timed[groups.timing[row]]
            times = world.estimator.costs_of(plan).times(gpu, tp=tp, samples=samples)
            found[str(groups.ids[row])] = updated[row] * times.optimizer_s_per_parameter
        return found
    for p, pipeline in enumerate(plan.pipelines):
        devices = len(pipeline.stages) // plan.virtual_stages
        size = plan.size_of(pipeline)
        for s, stage in enumerate(pipeline.stages):
            for i, place in enumerate(stage.places):
                samples = size * stage.split[i] // sum(stage.split)
                times = world.estimator.costs_of(plan).times(
                    place.gpu, tp=stage.tp, samples=samples
                )
                for layer in range(*stage.layers):
                    count = float(world.estimator.costs_of(plan).parameters(stage.tp)[layer])
                    if world.job.zero == 1:
                        count /= holders[layer]
                    key = str((p, s % devices, i))
                    found[key] += count * times.optimizer_s_per_parameter
        if devices == 1:
            # Embedding and head on one device: what they share is stepped once.
            for i, place in enumerate(pipeline.stages[0].places):
                first = pipeline.stages[0]
                samples = size * first.split[i] // sum(first.split)
                times = world.estimator.costs_of(plan).times(
                    place.gpu, tp=first.tp, samples=samples
                )
                count = world.estimator.costs_of(plan).tied_parameters(first.tp)
                if world.job.zero == 1:
                    count /= holders[-1]
                found[str((p, 0, i))] -= count * times.optimizer_s_per_parameter
    return found


@pytest.mark.sim
@pytest.mark.parametrize("part", range(4))
def test_estimate_of_any_plan_matches_the_oracle(part: int, examples: int) -> None:
    """All mixed: boundaries, kinds, TP, counts, sizes, zones, recomputation, splits, schedules."""
    overlapping = synced = sizes = 0
    for case in range(examples):
        seed = f"plan {part} {case}"
        rng = random.Random(seed)
        world = random_world(rng)
        for number in range(3):
            plan = random_plan(rng, world, most_micro_batches=rng.choice([4, 12, 40]))
            plan = replace(with_shares(rng, plan), sequence_parallel=number == 2)
            plan = with_own_sizes(rng, plan) if number == 1 else plan
            estimate = world.estimator.estimate(plan)
            expected = judged_iteration_s(world, plan)
            assert estimate.iteration_s == pytest.approx(expected, rel=1e-9), (seed, number, plan)
            assert math.isfinite(estimate.iteration_s)
            synced += len(plan.pipelines) > 1
            sizes += len(plan.sizes) > 1
            overlapping += len(plan.pipelines) > 1 and world.job.gradient_sync == "overlap"
    # Random cases could avoid what matters; these may not.
    assert overlapping >= examples // 2
    assert synced >= examples
    assert sizes >= examples // 4


@pytest.mark.sim
def test_estimate_of_a_plan_with_divided_backwards_matches_the_oracle(examples: int) -> None:
    for case in range(examples):
        seed = f"zero-bubble {case}"
        rng = random.Random(seed)
        world = random_world(rng)
        most = rng.choice([4, 12])
        plan = random_plan(rng, world, schedules=("zero-bubble",), most_micro_batches=most)
        estimate = world.estimator.estimate(plan)
        expected = judged_iteration_s(world, plan)
        assert estimate.iteration_s == pytest.approx(expected, rel=1e-9), (seed, plan)
