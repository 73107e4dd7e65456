"""Offloaded activations: passes against a replay of layers and copies, memory and hosts by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import patch

import pytest

from simulator.cluster.place_facts import PlaceFacts
from simulator.estimate.machine_layout import lay_out
from simulator.estimate.offload import OFFLOAD_NOTE, snapshot_bytes
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.models.layers import Recompute
from simulator.spec.plan import Pipeline, Plan, Stage
from tests.simulator.estimate.test_estimator_oracle import judged_iteration_s
from tests.simulator.estimate.test_memory import SAMPLES, TOKENS, devices, two_stages
from tests.simulator.estimate.test_memory import world as fixed_world
from tests.simulator.worlds import (
    GPUS,
    World,
    place,
    random_plan,
    random_world,
    recomputed_layers,
    with_shares,
)


def with_offload(rng: random.Random, plan: Plan) -> Plan:
    """The plan in which each stage offloads any of the layers that it does not recompute."""
    pipelines = []
    for pipeline in plan.pipelines:
        stages = []
        for stage in pipeline.stages:
            left = stage.layers[1] - stage.layers[0] - stage.recomputed
            stages.append(replace(stage, offload=rng.randint(0, left)))
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(plan, pipelines=tuple(pipelines))


def put_links(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Let each GPU kind copy at any speed."""
    rates = {gpu: 10 ** rng.uniform(7, 11) for gpu in GPUS}
    monkeypatch.setattr(LayerCosts, "host_bytes_per_s", lambda _, gpu: rates[gpu])


def replayed(
    forward: list[float], backward: list[float], copies: dict[int, float]
) -> tuple[float, float]:
    """Ends of the passes of layers, some of which are copied; step by step."""
    now = link = 0.0
    for layer, seconds in enumerate(forward):
        now += seconds
        if layer in copies:
            link = max(link, now) + copies[layer]
    ahead = max(now, link)
    link, there = 0.0, {}
    for layer in sorted(copies, reverse=True):
        link += copies[layer]
        there[layer] = link
    now = 0.0
    for layer in reversed(range(len(backward))):
        now = max(now, there.get(layer, 0.0)) + backward[layer]
    return ahead, now


def expected_passes(world: World, plan: Plan, stage: Stage, index: int) -> tuple[float, float]:
    """Forward and backward of a stage's group, without messages and loading."""
    gpu, size = stage.places[index].gpu, plan.micro_batch_size
    samples = size * stage.split[index] // sum(stage.split)
    times = world.costs.times(gpu, tp=stage.tp, samples=samples)
    kept = world.costs.kept_bytes(tp=stage.tp, samples=samples, recompute="none", gpu=gpu)
    rate = world.costs.host_bytes_per_s(gpu)
    assert rate is not None
    first, again = stage.layers[0], recomputed_layers(world, stage)
    away = range(first + stage.recomputed, first + stage.recomputed + stage.offload)
    return replayed(
        [times.forward[k] for k in range(*stage.layers)],
        [times.backward[k] + (times.forward[k] if k in again else 0) for k in range(*stage.layers)],
        {k - first: kept[k] / rate for k in away},
    )


@pytest.mark.sim
def test_passes_end_with_their_copies(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The iteration, too, is that of the oracle with such passes."""
    waiting = 0
    for case in range(examples):
        rng = random.Random(f"offload {case}")
        put_links(monkeypatch, rng)
        world = random_world(rng)
        plain = with_shares(rng, random_plan(rng, world, schedules=("1f1b", "gpipe")))
        plan = with_offload(rng, plain)
        layout = lay_out(plan, world.estimator.facts.machines)
        works, others = (
            world.estimator.pipeline_times(each, lay_out(each, world.estimator.facts.machines))
            for each in (plan, plain)
        )
        assert layout.groups.plan.offloads == plan.offloads
        for pipeline, work, other in zip(plan.pipelines, works, others, strict=True):
            for (s, i), times, before in zip(work.groups, work.times, other.times, strict=True):
                stage = pipeline.stages[s]
                ahead, back = expected_passes(world, plan, stage, i)
                as_was = expected_passes(world, plan, replace(stage, offload=0), i)
                assert times.forward - before.forward == pytest.approx(
                    ahead - as_was[0], abs=1e-9
                ), case
                assert times.backward == pytest.approx(back, rel=1e-9), case
                assert before.backward == pytest.approx(as_was[1], rel=1e-9), case
                waiting += ahead > as_was[0] and back > as_was[1]
        found, before_s = (world.estimator.estimate(each).iteration_s for each in (plan, plain))
        assert found == pytest.approx(judged_iteration_s(world, plan), rel=1e-9), case
        assert found >= before_s * (1 - 1e-12), case
    assert waiting >= examples // 2


def test_an_iteration_by_hand() -> None:
    """One stage of five layers: the second and third travel at a third of their speed."""
    here = fixed_world()
    plan = Plan(2, (Pipeline(4, (Stage((0, 5), 1, (place(),), 1, offload=2),)),))
    plain = Plan(2, (Pipeline(4, (Stage((0, 5), 1, (place(),), 1),)),))
    times = here.costs.times("V100-16", tp=1, samples=SAMPLES)
    copy_s = float(3 * times.forward[1])
    kept = here.costs.kept_bytes(tp=1, samples=SAMPLES, recompute="none", gpu="V100-16")
    with patch.object(LayerCosts, "host_bytes_per_s", return_value=float(kept[1]) / copy_s):
        longer_s = here.estimator.estimate(plan).iteration_s
    longer_s -= here.estimator.estimate(plain).iteration_s
    # Two copies after the second layer; the fourth and fifth are done meanwhile.
    hidden = times.forward[2] + times.forward[3] + times.forward[4]
    assert 2 * copy_s > hidden
    ahead = max(0.0, 2 * copy_s - hidden)
    # The second copy comes back after both; the third layer has then run, or waits for the first.
    done = max(times.backward[3] + times.backward[4], copy_s) + times.backward[2]
    waits = max(done, 2 * copy_s) - times.backward[2:].sum()
    assert longer_s == pytest.approx(4 * (ahead + waits), rel=1e-6)


def test_a_device_holds_one_micro_batch_of_what_is_offloaded() -> None:
    """Of six micro batches two are in flight on the first stage, and one on the last."""
    first, last = two_stages().pipelines[0].stages
    cases: tuple[tuple[int, Recompute | int, int], ...] = (
        (0, "none", 2 * (3 + 20)),
        (1, "none", 3 + 2 * 20),
        (2, "none", 3 + 20),
        (1, 1, 2 * 3 + 20),  # An embedding has nothing to recompute.
    )
    for offload, again, kept in cases:
        stages = (replace(first, recompute=again, offload=offload), replace(last, offload=2))
        plan = Plan(2, (Pipeline(6, stages),))
        one, other = devices(fixed_world(), plan)
        assert one.activations == 2 * SAMPLES * TOKENS * kept
        assert other.activations == 2 * SAMPLES * TOKENS * (20 + 20 + 7), "nothing is gained"
        gpipe, _ = devices(fixed_world(), replace(plan, schedule="gpipe"))
        many = {0: 6 * 23, 1: 3 + 6 * 20, 2: 23}[offload] if again == "none" else 6 * 3 + 20
        assert gpipe.activations == 2 * SAMPLES * TOKENS * many


def test_hosts_without_room_do_not_fit() -> None:
    world = fixed_world()
    first, last = two_stages().pipelines[0].stages
    plan = Plan(2, (Pipeline(6, (replace(first, offload=2), last)),))
    needed = 2 * 2 * SAMPLES * TOKENS * (3 + 20)
    reserved = snapshot_bytes(world.job) / 2
    for room, fits in ((needed, True), (needed - 1, False), (None, True)):
        share = None if room is None else reserved + room
        with patch.object(PlaceFacts, "host_bytes_per_gpu", return_value=share):
            found = world.estimator.estimate(plan)
        assert found.fits is fits
        assert OFFLOAD_NOTE in found.notes
        said = [note for note in found.to_json()["notes"] if "does not fit" in note]
        assert bool(said) is not fits
        assert all("V100-16x4 has" in each and "stage 0 offloads" in each for each in said)
    assert OFFLOAD_NOTE not in world.estimator.estimate(two_stages()).notes


def test_offload_leaves_room_for_the_snapshots_of_each_kind_of_job() -> None:
    job = fixed_world().job
    far = replace(job, checkpoint=replace(job.checkpoint, survive="zone"))
    sizes = {snapshot_bytes(each) for each in (replace(job, zero=1), far)}
    assert sizes == {snapshot_bytes(job) * 8 // 6}


def test_the_share_of_a_machines_memory_is_the_catalogues() -> None:
    facts = fixed_world().estimator.facts
    assert facts.host_bytes_per_gpu(place()) == 30 * 2**30
