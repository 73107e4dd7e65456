"""The memory of a template's stages against the memory model, on random plans in random worlds."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import patch

import pytest

from planner.pipelines.pipeline_template import TemplateMaker
from planner.pipelines.stage_memory import TemplateStage, room_of
from planner.problem.inventory import lots_of
from simulator.cluster.place_facts import PlaceFacts
from simulator.models.families import build_model
from simulator.models.layers import Recompute
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Plan, Stage
from tests.planner.search.tight_plans import just_enough
from tests.simulator.worlds import place, random_plan, random_world, small_model, world_of


@pytest.mark.sim
def test_a_stage_fits_exactly_from_the_memory_that_the_memory_model_requires(examples: int) -> None:
    """The planner computes for all ranges of layers what the simulator does for one plan.

    Where parts of layers have one owner each, a device may own none of them, and fit with less.
    """
    stages = 0
    for seed in range(examples):
        rng = random.Random(f"template memory {seed}")
        world = random_world(rng)
        plan = random_plan(rng, world, schedules=("1f1b",), splits=False)
        judge = world.estimator
        by_owner = world.job.zero == 1 and judge.costs.runtime.zero1_by_bucket
        lots = lots_of(just_enough(plan, world), judge.facts)
        lot_of = {lot.place.key: number for number, lot in enumerate(lots)}
        for pipeline, devices in zip(plan.pipelines, judge.estimate(plan).memory, strict=True):
            for number, (stage, device) in enumerate(zip(pipeline.stages, devices, strict=True)):
                one = TemplateStage(lot_of[stage.place.key], stage.tp, stage.recompute)
                held = min(pipeline.micro_batches, len(pipeline.stages) - number)
                for factor in (1 - 1e-6, 1 + 1e-6):
                    with patch.object(
                        PlaceFacts, "capacity_bytes", return_value=device.total * factor
                    ):
                        maker = TemplateMaker(judge.costs, judge.network, judge.facts, lots)
                        most = maker.memory.most_in_flight(
                            one, plan.micro_batch_size, len(plan.pipelines)
                        )
                    first, end = stage.layers
                    fits = most[first, end] >= held
                    assert fits == (factor > 1) or (fits and by_owner), (seed, pipeline, number)
                stages += 1
    assert stages > examples


@pytest.mark.sim
def test_as_few_layers_are_recomputed_as_the_memory_model_requires(examples: int) -> None:
    """Any number is tried. Where parts of layers have one owner each, tables may promise more."""
    shares = 0
    for seed in range(examples):
        rng = random.Random(f"fewest {seed}")
        job = random_world(rng).job
        world = world_of(replace(job, model=small_model(layers=rng.randint(6, 14), family="opt")))
        plan = random_plan(rng, world, schedules=("1f1b",), splits=False)
        judge = world.estimator
        lots = lots_of(just_enough(plan, world), judge.facts)
        s = rng.randrange(len(plan.pipelines[0].stages))
        stage = plan.pipelines[0].stages[s]
        held = min(plan.pipelines[0].micro_batches, len(plan.pipelines[0].stages) - s)
        ways = ("none", *range(1, stage.layers[1] - stage.layers[0]), "full")
        devices = [judge.estimate(recomputing(plan, s, how)).memory[0][s] for how in ways]
        needed = [device.total for device in devices]
        capacity = rng.uniform(min(needed), max(needed) * 1.001)
        fewest = next(n for n, total in enumerate(needed) if total <= capacity)
        lot = next(n for n, one in enumerate(lots) if one.place == stage.place)
        one = TemplateStage(lot, stage.tp, "auto")
        asked = one, plan.micro_batch_size
        with patch.object(PlaceFacts, "capacity_bytes", return_value=capacity):
            memory = TemplateMaker(judge.costs, judge.network, judge.facts, lots).memory
            least = memory.fewest_recomputed(*asked, len(plan.pipelines), held)[stage.layers]
            room = room_of(replace(devices[0], capacity=capacity))
            found = memory.recomputed(*asked, stage.layers, in_flight=held, room=room)
        assert least <= fewest, seed
        again = replace(stage, recompute=found).recomputed
        assert needed[again] == needed[fewest], seed
        assert again >= fewest, seed
        shares += isinstance(found, int)
    assert shares > examples / 20


def recomputing(plan: Plan, stage: int, how: Recompute | int) -> Plan:
    """The plan with another recomputation of one stage of the first pipeline."""
    first, *others = plan.pipelines
    stages = list(first.stages)
    stages[stage] = replace(stages[stage], recompute=how)
    return replace(plan, pipelines=(replace(first, stages=tuple(stages)), *others))


def test_a_plan_of_several_tp_degrees_recomputes_what_its_copies_of_gradients_require() -> None:
    """A rank that holds a layer alone copies it in parts, to sum them with those of two ranks.

    Templates do not know the other pipelines, so the whole plan decides.
    """
    model = build_model("gpt2", layers=6, hidden=4096, heads=32, vocab=50304, tied=False)
    job = Job("wide", model, 8, 1024, precision="bf16", max_tp=2, recompute="auto")
    world = world_of(job)
    judge, count = world.estimator, len(model.layers)

    def plan(recompute: Recompute | int) -> Plan:
        coarse = Stage((0, count), 1, (place("A100-40"),), recompute)
        fine = Stage((0, count), 2, (place("A100-40"),))
        return Plan(1, (Pipeline(4, (coarse,)), Pipeline(4, (fine,))))

    def needed(recompute: Recompute | int) -> float:
        return judge.estimate(plan(recompute)).memory[0][0].total

    assert needed("none") > needed(3)
    lots = lots_of(just_enough(plan("none"), world), judge.facts)
    with patch.object(PlaceFacts, "capacity_bytes", return_value=1.0005 * needed(3)):
        maker = TemplateMaker(judge.costs, judge.network, judge.facts, lots)
        fitted = maker.fitted(plan("none"))
        assert fitted.pipelines[0].stages[0].recompute == 3
        assert judge.estimate(fitted).memory[0][0].fits
