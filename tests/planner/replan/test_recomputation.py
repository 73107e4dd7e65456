"""Replanning of pipelines that recompute some of their layers."""

from __future__ import annotations

import pytest

from planner.replan.nodes import nodes_of
from planner.replan.replanner import Replanner
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.models.layers import Recompute
from simulator.models.presets import preset
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Plan, Stage

POOL = Pool("us-central1-a", "T4", "T4x8", 8, 16)
CUTS = (0, 13, 25, 38, 50)


def running_plan(first: Recompute | int, micro_batches: int) -> Plan:
    """Four pipelines of four stages, of which the first may recompute something."""
    ways: list[Recompute | int] = [first, "none", "none", "none"]
    stages = tuple(
        Stage((CUTS[s], CUTS[s + 1]), 1, (POOL.place,), way) for s, way in enumerate(ways)
    )
    return Plan(2, (Pipeline(micro_batches, stages),) * 4, together=1)


@pytest.mark.parametrize(
    ("first", "micro_batches"), [("none", 2), (6, 8), (9, 8), ("full", 8)], ids=str
)
def test_pipelines_that_stay_recompute_as_many_layers_as_they_must(
    first: Recompute | int, micro_batches: int
) -> None:
    """With two micro batches each nothing is recomputed; after a loss four are in flight."""
    job = Job("t4", preset("gpt2-xl"), 8 * micro_batches, 1024, precision="bf16", recompute="auto")
    replanner = Replanner(job, Cluster((POOL,), load_catalogue()), Measurements())
    nodes = nodes_of(replanner.cluster)
    placed = replanner.place(running_plan(first, micro_batches), nodes)
    assert placed is not None
    running = replanner.prepare(placed, nodes)
    assert running.estimate.fits
    found = replanner.replan(running, nodes[:1])
    assert found.plan is not None
    assert found.estimate is not None
    assert found.estimate.fits
    homes = [tuple(stage.places for stage in pipeline.stages) for pipeline in placed.pipelines]
    for pipeline in found.plan.pipelines:
        assert tuple(stage.places for stage in pipeline.stages) in homes, "it moved"
        assert [stage.recompute for stage in pipeline.stages] == [6, "none", "none", "none"]
