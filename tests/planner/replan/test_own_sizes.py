"""Replans of a plan whose pipelines have micro batch sizes of their own."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from planner.replan.damage import RunningPlan, template_size
from planner.replan.nodes import PlannerNode, nodes_of, nodes_used
from planner.replan.replan_search import ReplanSearch
from planner.replan.replanner import Replanner
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.plan_check import check_plan
from simulator.models.presets import preset
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from tests.planner.replan.test_replanner import change, check

JOB = Job("mixed", preset("opt-350m"), global_batch=96, sequence=2048, precision="fp16")
WIDE = Place("A100-80", "A100-80x2", "us-central1-a")
NARROW = Place("T4", "T4x2", "us-central1-a")
CLUSTER = Cluster(
    tuple(
        Pool(place.zone, place.gpu, place.machine, 2, 4, price_usd_per_gpu_hour=2.0,
             price_source="cluster file")
        for place in (WIDE, NARROW)
    ),
    load_catalogue(),
)  # fmt: skip
LAYERS = len(JOB.model.layers)


def on(place: Place, micro_batches: int, size: int | None = None, cuts: tuple[int, ...] = ()):
    ends = (0, *cuts, LAYERS)
    stages = tuple(Stage(span, 1, (place,)) for span in pairwise(ends))
    return Pipeline(micro_batches, stages, size)


PLAN = Plan(
    8, (*(on(WIDE, 2) for _ in range(4)), on(NARROW, 16, 1, (13,)), on(NARROW, 8, 2, (13,)))
)
"""Two T4 are a pipeline: one of them holds micro batches of one sample, the other of two."""


def running_on() -> tuple[Replanner, RunningPlan, tuple[PlannerNode, ...]]:
    replanner, nodes = Replanner(JOB, CLUSTER, Measurements()), nodes_of(CLUSTER)
    placed = replanner.place(PLAN, nodes)
    assert placed is not None
    assert placed.size_by_pipeline == PLAN.size_by_pipeline
    return replanner, replanner.prepare(placed, nodes), nodes


@pytest.mark.parametrize("gpu", ["A100-80", "T4"])
def test_survivors_keep_their_sizes_and_share_out_the_samples(gpu: str) -> None:
    replanner, running, nodes = running_on()
    lost = next(one for one in nodes if one.gpu == gpu)
    live = tuple(one for one in nodes if one != lost)
    found = ReplanSearch(replanner, running, live, 0).survivors()
    assert found is not None
    kept = [
        pipeline
        for pipeline in running.plan.pipelines
        if all(stage.place.node != lost.id for stage in pipeline.stages)
    ]
    sizes = tuple(running.plan.size_of(pipeline) for pipeline in kept)
    assert found.plan.size_by_pipeline == sizes
    assert [p.stages for p in found.plan.pipelines] == [p.stages for p in kept]
    assert found.plan.samples_per_iteration == JOB.global_batch


def test_mixes_are_judged_in_the_smallest_size_and_in_sizes_of_their_own() -> None:
    replanner, running, nodes = running_on()
    assert template_size(running.plan, JOB) == 1
    assert {template.micro_batch for template in running.templates} == {1}
    live = tuple(one for one in nodes if one.id != min(nodes_used(running.plan)))
    search = ReplanSearch(replanner, running, live, 8)
    base = search._base()
    own, plain = search._plans_of(base)
    assert plain.sizes == (1,)
    assert own.sizes == (2, 8)
    for plan in (own, plain):
        assert plan.samples_per_iteration == JOB.global_batch


def test_any_changes_are_survived() -> None:
    replanner, running, nodes = running_on()
    rng, away, kept = random.Random("own sizes"), list[PlannerNode](), 0
    for turn in range(12):
        nodes = change(rng, nodes, away, turn)
        found = replanner.replan(running, nodes)
        if found.plan is None:
            assert found.problems
            continue
        check(found, replanner, nodes)
        kept += len(found.plan.sizes) > 1
        running = replanner.prepare(found.plan, nodes)
    assert kept, "no replan had micro batch sizes per pipeline"


def test_a_replan_has_no_size_that_the_job_rules_out() -> None:
    """Only 4 is allowed and divides the batch; a running pipeline has a smaller size."""
    job = replace(JOB, global_batch=20, micro_batches=(3, 4))
    plan = Plan(4, (on(WIDE, 2, cuts=(13,)), on(NARROW, 4, 3, (13,))))
    assert check_plan(plan, job, CLUSTER) == ()
    replanner, nodes = Replanner(job, CLUSTER, Measurements()), nodes_of(CLUSTER)
    placed = replanner.place(plan, nodes)
    assert placed is not None
    running = replanner.prepare(placed, nodes)
    assert template_size(running.plan, job) == 1
    found = replanner.replan(running, tuple(node for node in nodes if node.gpu == NARROW.gpu))
    assert found.plan is not None
    assert set(found.plan.sizes) <= {3, 4}
    assert check_plan(found.plan, job, CLUSTER) == ()


def test_templates_have_a_size_that_divides_the_batch() -> None:
    odd = replace(PLAN, micro_batch_size=5, pipelines=(on(WIDE, 1, 5), on(NARROW, 13, 7, (13,))))
    assert template_size(odd, JOB) == 4
    assert template_size(replace(odd, pipelines=odd.pipelines[:1]), JOB) == 5
    assert template_size(odd, replace(JOB, micro_batches=(8,))) == 1
