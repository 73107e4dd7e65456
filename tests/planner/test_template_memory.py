"""The memory of a template's stages against the memory model, on random plans in random worlds."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest

from planner.pipelines.pipeline_template import TemplateMaker, TemplateStage
from planner.problem.inventory import lots_of
from simulator.cluster.place_facts import PlaceFacts
from tests.planner.search.test_bound import just_enough
from tests.simulator.worlds import random_plan, random_world


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
        lots = lots_of(just_enough(plan, world), judge.sites)
        lot_of = {lot.place.key: number for number, lot in enumerate(lots)}
        for pipeline, devices in zip(plan.pipelines, judge.estimate(plan).memory, strict=True):
            for number, (stage, device) in enumerate(zip(pipeline.stages, devices, strict=True)):
                one = TemplateStage(lot_of[stage.place.key], stage.tp, stage.recompute)
                held = min(pipeline.micro_batches, len(pipeline.stages) - number)
                for factor in (1 - 1e-6, 1 + 1e-6):
                    with patch.object(
                        PlaceFacts, "capacity_bytes", return_value=device.total * factor
                    ):
                        maker = TemplateMaker(judge.costs, judge.network, judge.sites, lots)
                        most = maker.most_in_flight(one, plan.micro_batch_size, len(plan.pipelines))
                    first, end = stage.layers
                    fits = most[first, end] >= held
                    assert fits == (factor > 1) or (fits and by_owner), (seed, pipeline, number)
                stages += 1
    assert stages > examples
