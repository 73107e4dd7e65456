"""The search looks for simpler and cheaper plans near the best, and takes what is tied with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.api import plan_job
from planner.problem.preference import simplicity
from planner.problem.question import Question
from planner.what_if import explained
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.job_file import load_job

EXAMPLES = Path(__file__).parents[3] / "examples"


def question(*pools: Pool) -> Question:
    job = replace(load_job(EXAMPLES / "opt-350m.toml"), micro_batches=(4,))
    cluster = Cluster(pools, load_catalogue())
    return Question(job, cluster, Measurements(), budget=24, proves=False)


def pool(gpu: str, machine: str, price: float) -> Pool:
    """Eight GPUs in two machines."""
    return Pool(
        "us-central1-a", gpu, machine, 4, 8,
        price_usd_per_gpu_hour=price, price_source="cluster file",
    )  # fmt: skip


A100, T4 = pool("A100-40", "a2-highgpu-4g", 3.0), pool("T4", "T4x4", 0.4)


def test_a_second_kind_that_brings_2_percent_for_10_percent_of_the_dollars_is_left_out() -> None:
    asked = question(A100, T4)
    fastest, simple = plan_job(asked), plan_job(replace(asked, prefer="simple"))
    assert fastest.plan is not None
    assert len(fastest.plan.gpus_used()) == 2
    assert simple.plan is not None
    assert simple.plan.gpus_used() == {"A100-40@us-central1-a": 8}
    assert simple.instead_of is not None
    assert simple.instead_of.saves == pytest.approx(0.1, abs=0.02)
    assert 0 < simple.instead_of.loses < 0.03


def test_answer_states_what_the_preferred_plan_gives_away() -> None:
    """On eight A100 in one zone, single stages are 1.2 % slower than pairs."""
    asked = question(A100)
    fastest = plan_job(asked)
    simple = plan_job(replace(asked, prefer="simple"))
    assert fastest.instead_of is None
    assert fastest.plan is not None
    assert simple.plan is not None
    assert fastest.objective is not None
    assert simple.objective is not None
    assert simple.instead_of is not None
    assert simple.instead_of.simpler == "1 stage instead of 2, more even layers"
    assert simplicity(simple.plan) < simplicity(fastest.plan)
    assert simple.instead_of.iteration_s == fastest.objective
    assert simple.instead_of.loses == pytest.approx(simple.objective / fastest.objective - 1)
    assert any("cannot be told apart" in sentence for sentence in simple.explain)
    assert simple.lower_bound <= fastest.objective
    document = simple.to_json(seconds=0.0)
    assert document["best_by_estimate"]["loses"] == simple.instead_of.loses
    # More searches that explain it compare like with like.
    for one in explained(replace(asked, prefer="simple"), simple).why.one_more:
        assert one.seconds_gained >= 0
