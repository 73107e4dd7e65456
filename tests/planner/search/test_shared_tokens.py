"""Sequence parallelism is tried where it is allowed, and taken where it helps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from planner.api import plan_job
from planner.problem.job_options import token_sharing_degrees
from planner.problem.question import OUTSIDE, Answer, Question
from simulator.api import Measurements, estimator
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.plan_check import check_plan
from simulator.inputs.plan_file import plan_to_json, read_plan
from simulator.models.presets import preset
from simulator.spec.job import Allowed, Job, Objective

LARGE = Job(
    "large", preset("llama-2-13b"), global_batch=64, sequence=4096, precision="bf16", max_tp=8
)
"""Its activations need TP on GPUs of 40 GB."""
SMALL = Job("small", preset("opt-1.3b"), global_batch=256, sequence=2048, precision="bf16")


def cluster(gpus: int) -> Cluster:
    pool = Pool(
        "us-central1-a", "A100-40", "a2-highgpu-8g", 8, gpus, price_usd_per_gpu_hour=3.0,
        price_source="cluster file",
    )  # fmt: skip
    return Cluster((pool,), load_catalogue())


@cache
def answer(job: Job, *allow: Allowed, budget: int = 10) -> Answer:
    job = replace(job, objective=replace(job.objective, allow=allow))
    here = cluster(16 if job.name == "large" else 8)
    asked = Question(job, here, Measurements(), budget=budget, proves=False, is_bounded=False)
    return plan_job(asked)


def test_tokens_are_shared_only_where_that_is_allowed() -> None:
    plain, shared = answer(LARGE), answer(LARGE, "sequence")
    assert plain.plan is not None
    assert shared.plan is not None
    assert (plain.plan.sequence_parallel, shared.plan.sequence_parallel) == (False, True)
    assert plain.objective is not None
    assert shared.objective is not None
    assert shared.objective < 0.95 * plain.objective
    assert shared.space.endswith(OUTSIDE["sequence"])
    assert not plain.space.endswith(OUTSIDE["sequence"])


def test_the_estimate_of_a_chosen_plan_is_that_of_its_file() -> None:
    found = answer(LARGE, "sequence")
    assert found.plan is not None
    assert found.estimate is not None
    plan = read_plan(plan_to_json(found.plan))
    assert check_plan(plan, LARGE, cluster(16)) == ()
    judge = estimator("event", job=LARGE, cluster=cluster(16), measurements=Measurements())
    assert judge.estimate(plan).iteration_s == found.estimate.iteration_s
    assert judge.estimate(plan).memory == found.estimate.memory


@pytest.mark.slow
def test_limit_that_only_shared_tokens_keep_is_kept() -> None:
    plain, shared = answer(LARGE), answer(LARGE, "sequence")
    assert plain.objective is not None
    assert shared.objective is not None
    rate = 2 / (plain.objective + shared.objective)
    job = replace(LARGE, objective=Objective(min_iterations_per_s=rate))
    assert answer(job).plan is None
    found = answer(job, "sequence").plan
    assert found is not None
    assert found.sequence_parallel


def test_without_tensor_parallelism_there_is_nothing_to_share() -> None:
    found = answer(SMALL, "sequence")
    assert found.plan == answer(SMALL).plan
    assert found.plan is not None
    assert not found.plan.sequence_parallel


@pytest.mark.slow
def test_chunks_and_shared_tokens_may_come_together() -> None:
    few = replace(LARGE, global_batch=16)
    found, either = answer(few, "sequence", "interleaved"), answer(few, "sequence")
    assert found.plan is not None
    assert (found.plan.sequence_parallel, found.plan.schedule) == (True, "interleaved")
    assert found.objective is not None
    assert either.objective is not None
    assert found.objective < either.objective


def test_degrees_divide_the_sequence_of_a_language_model() -> None:
    assert token_sharing_degrees(replace(LARGE, sequence=4098)) == (1, 2)
    vision = replace(LARGE, model=preset("vit-b"), sequence=196, max_tp=4)
    assert token_sharing_degrees(vision) == (1,)
