"""Plans with chunks of layers are tried where they are allowed, and taken where they are faster."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from planner.api import plan_job
from planner.problem.question import OUTSIDE, Question
from planner.search.chunks import CHUNKS, in_chunks
from simulator.api import Measurements, estimator
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.plan_check import check_plan, check_plan_for_job
from simulator.inputs.plan_file import plan_to_json, read_plan
from simulator.models.layers import Recompute
from simulator.models.presets import preset
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage

PLACE = Place("A100-40", "a2-highgpu-8g", "us-central1-a")
CLUSTER = Cluster(
    (Pool(PLACE.zone, PLACE.gpu, PLACE.machine, 8, 8, price_usd_per_gpu_hour=3.0,
          price_source="cluster file"),),
    load_catalogue(),
)  # fmt: skip
JOB = Job("few", preset("opt-6.7b"), global_batch=16, sequence=2048, precision="bf16")
"""Too large for less than four GPUs, and with few micro batches."""
ASKED = Question(JOB, CLUSTER, Measurements(), budget=40, proves=False, is_bounded=False)


def allowing(question: Question) -> Question:
    objective = replace(question.job.objective, allow=("interleaved",))
    return replace(question, job=replace(question.job, objective=objective))


CHUNKED = allowing(ASKED)


def plan_of(cuts: tuple[int, ...], *micro_batches: int) -> Plan:
    stages = tuple(Stage(span, 1, (PLACE,), "full") for span in pairwise(cuts))
    return Plan(1, tuple(Pipeline(count, stages) for count in micro_batches))


def test_chunks_are_taken_only_where_they_are_allowed() -> None:
    plain = plan_job(ASKED)
    chunked = plan_job(CHUNKED)
    assert plain.plan is not None
    assert chunked.plan is not None
    assert plain.plan.schedule == "1f1b"
    assert (chunked.plan.schedule, chunked.plan.virtual_stages > 1) == ("interleaved", True)
    assert plain.objective is not None
    assert chunked.objective is not None
    assert chunked.objective < 0.95 * plain.objective
    assert chunked.space.endswith(OUTSIDE["interleaved"])
    assert not plain.space.endswith(OUTSIDE["interleaved"])


def test_limit_that_only_chunks_keep_is_kept() -> None:
    plain, chunked = plan_job(ASKED), plan_job(CHUNKED)
    assert plain.objective is not None
    assert chunked.objective is not None
    rate = 2 / (plain.objective + chunked.objective)
    job = replace(JOB, objective=replace(JOB.objective, min_iterations_per_s=rate))
    assert plan_job(replace(ASKED, job=job)).plan is None
    found = plan_job(allowing(replace(ASKED, job=job, is_bounded=True, gap=0.01)))
    assert found.plan is not None
    assert found.plan.schedule == "interleaved"


def test_gap_that_chunks_reach_is_not_reported_as_missed() -> None:
    found = plan_job(replace(CHUNKED, is_bounded=True, gap=0.01))
    assert found.plan is not None
    assert (found.plan.schedule, found.note) == ("interleaved", "")


def test_the_estimate_of_a_chosen_plan_is_that_of_its_file() -> None:
    found = plan_job(CHUNKED)
    assert found.plan is not None
    assert found.estimate is not None
    assert check_plan(found.plan, JOB, CLUSTER) == ()
    judge = estimator("event", job=JOB, cluster=CLUSTER, measurements=Measurements())
    assert judge.estimate(found.plan).iteration_s == found.estimate.iteration_s


@pytest.mark.slow
def test_a_plan_that_hardly_gains_is_left_as_it_is_for_its_simplicity() -> None:
    """With many micro batches the gain of chunks is below the error bar."""
    many = allowing(replace(ASKED, job=replace(JOB, global_batch=128)))
    fastest, simple = plan_job(many), plan_job(replace(many, prefer="simple"))
    assert fastest.plan is not None
    assert fastest.plan.schedule == "interleaved"
    assert simple.plan is not None
    assert simple.plan.schedule == "1f1b"
    assert simple.instead_of is not None
    assert simple.instead_of.iteration_s == fastest.objective
    assert not simple.space.endswith(OUTSIDE["interleaved"])


def test_each_variant_keeps_the_rules_and_its_device_groups() -> None:
    plan = plan_of((0, 9, 17, 25, 34), 8, 8)
    found = list(in_chunks(plan))
    assert {one.virtual_stages for one in found} == set(CHUNKS)
    for one in found:
        assert check_plan_for_job(one, JOB) == ()
        assert one.gpus_used() == plan.gpus_used()
    layers = [
        [sum(b - a for a, b in (s.layers for s in p.stages[k::4])) for k in range(4)]
        for one in found
        for p in one.pipelines
    ]
    assert [9, 8, 8, 9] in layers


def test_chunks_recompute_as_many_layers_together_as_their_stage() -> None:
    """The first chunks do: they hold the most micro batches."""
    plan = plan_of((0, 9, 17, 25, 34), 8, 8)
    numbers: tuple[Recompute | int, ...] = (7, "none", "full", 2)
    stages = zip(plan.pipelines[0].stages, numbers, strict=True)
    stages_of = tuple(replace(stage, recompute=number) for stage, number in stages)
    pipelines = tuple(replace(each, stages=stages_of) for each in plan.pipelines)
    for one in in_chunks(replace(plan, pipelines=pipelines)):
        assert read_plan(plan_to_json(one)) == one
        chunks = one.pipelines[0].stages
        assert sum(chunk.recomputed for chunk in chunks[0::4]) == 7
        assert {chunk.recompute for chunk in chunks[1::4]} == {"none"}
        assert {chunk.recompute for chunk in chunks[2::4]} == {"full"}
        assert (chunks[3].recompute, chunks[7].recompute) in {(2, "none"), ("full", "none")}


def test_micro_batches_are_shared_out_in_whole_rounds() -> None:
    found = next(iter(in_chunks(plan_of((0, 9, 17, 25, 34), 7, 9))))
    assert [each.micro_batches for each in found.pipelines] == [8, 8]
    assert list(in_chunks(plan_of((0, 9, 17, 25, 34), 7, 8))) == []
    assert list(in_chunks(plan_of((0, 9, 17, 25, 34), 2, 2))) == []


@pytest.mark.parametrize("cuts", [(0, 34), (0, *range(1, 18), 34)])
def test_one_device_group_and_too_few_layers_give_no_variant(cuts: tuple[int, ...]) -> None:
    assert list(in_chunks(plan_of(cuts, len(cuts) - 1))) == []
