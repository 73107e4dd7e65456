"""What the search finds on clusters that are too large to be searched in full."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner.api import plan_job
from planner.problem.question import Question
from planner.replan.replan_tables import ReplanTables
from planner.search.local_search import EventSearch, JudgedPlan
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.hardware.runtime_constants import PLATFORMS
from simulator.inputs.job_file import load_job
from simulator.models.presets import preset
from simulator.spec.job import Job, Objective
from simulator.spec.plan import Plan
from tests.planner.tight_memory import demo

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


@pytest.mark.slow
def test_pipelines_are_placed_one_by_one_where_that_is_faster() -> None:
    """By the rule of layout, the best known plan takes 5.378 s."""
    pool = Pool("us-central1-a", "A100-40", "a2-highgpu-4g", 4, 16)
    job = load_job(EXAMPLES / "opt-350m.toml")
    cluster = Cluster((pool,), load_catalogue())
    answer = plan_job(Question(job, cluster, Measurements(), "event", proves=False))
    assert answer.plan is not None
    assert answer.plan.together == 1
    assert answer.estimate is not None
    assert answer.estimate.iteration_s < 4.96


@pytest.mark.slow
def test_a_larger_budget_is_used() -> None:
    pool = Pool("us-central1-a", "A100-40", "a2-highgpu-4g", 4, 8)
    job = load_job(EXAMPLES / "opt-350m.toml")
    cluster = Cluster((pool,), load_catalogue())
    usual = Question(job, cluster, Measurements(), proves=False, is_bounded=False)
    plain, same, more = (plan_job(replace(usual, budget=n)) for n in (None, 400, 440))
    assert (same.plan, same.evaluations) == (plain.plan, plain.evaluations)
    assert plain.evaluations < 400
    assert more.evaluations >= 440
    assert plain.objective is not None
    assert more.objective is not None
    assert more.objective <= plain.objective


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machines", "part"),
    [
        ((2, 1, 2), (2, 1, 1)),
        ((2, 2, 2), (2, 1, 0)),
        ((2, 2, 3), (2, 1, 2)),
        ((3, 2, 3), (2, 2, 3)),
    ],
)
def test_more_machines_are_no_worse_where_memory_is_tight(
    tmp_path, monkeypatch, machines, part
) -> None:
    """Only one pipeline fits; it needs no memory for sums of gradients, as two under NCCL do."""
    for gpu in ("emulated-large", "emulated-small"):
        monkeypatch.setitem(PLATFORMS, gpu, replace(PLATFORMS[gpu], transport="nccl"))
    few = plan_job(demo(1.42, *part, folder=tmp_path))
    many = plan_job(demo(1.42, *machines, folder=tmp_path))
    assert few.estimate is not None
    assert many.estimate is not None
    assert many.estimate.iteration_s <= few.estimate.iteration_s * 1.001
    assert many.plan is not None
    (pipeline,) = many.plan.pipelines
    assert len({stage.place.zone for stage in pipeline.stages}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("model", "global_batch"), [("gpt-neo-2.7b", 128), ("opt-6.7b", 512)])
def test_more_machines_of_a_kind_cost_no_more(model: str, global_batch: int) -> None:
    """Templates that are quick on all GPUs are not those that are cheap."""
    job = Job(
        "j",
        preset(model),
        global_batch=global_batch,
        sequence=2048,
        precision="fp16",
        optimizer="adam",
        max_tp=4,
        recompute="auto",
        objective=Objective(goal="cost"),
    )

    def usd(machines: int) -> float:
        pool = Pool(
            *("us-central1-c", "A100-80", "a2-ultragpu-8g", 8, 8 * machines),
            price_usd_per_gpu_hour=3.9,
            price_source="cluster file",
        )
        cluster = Cluster((pool,), load_catalogue())
        answer = plan_job(Question(job, cluster, Measurements(), "event", proves=False))
        assert answer.objective is not None
        return answer.objective

    assert usd(24) <= usd(1) * 1.0001


@pytest.mark.parametrize(
    ("model", "global_batch", "gpus", "micro_batch", "seconds"),
    [
        ("opt-125m", 1024, 1, 256, 0.7835),
        ("gpt2-large", 4096, 8, 128, 1.8330),
        # 50 is the largest divisor up to 64, with which two of eight GPUs wait.
        ("opt-125m", 1000, 8, 125, 0.1116),
    ],
)
def test_micro_batches_are_as_large_as_they_fit(
    model: str, global_batch: int, gpus: int, micro_batch: int, seconds: float
) -> None:
    job = Job("j", preset(model), global_batch, 128, precision="bf16", optimizer="adam")
    pool = Pool("us-central1-a", "A100-80", "a2-ultragpu-8g", 8, gpus)
    answer = plan_job(Question(job, Cluster((pool,), load_catalogue()), Measurements()))
    assert answer.plan is not None
    assert answer.plan.micro_batch_size == micro_batch
    assert answer.objective is not None
    assert answer.lower_bound <= answer.objective < seconds


def test_a_large_micro_batch_that_the_job_names_gets_a_plan() -> None:
    """Two micro batches for 14 GPUs: from smaller ones, local search would reach them."""
    job = Job("j", preset("gpt2-large"), 256, 128, precision="bf16", optimizer="adam")
    pools = (
        Pool("us-central1-a", "A100-40", "a2-highgpu-4g", 4, 8),
        Pool("us-central1-a", "V100-16", "n1-standard-8-v100-1", 1, 6),
    )
    cluster = Cluster(pools, load_catalogue())
    asked = Question(replace(job, micro_batches=(128,)), cluster, Measurements(), proves=False)
    answer = plan_job(replace(asked, is_bounded=False))
    assert answer.objective is not None
    assert answer.objective < 0.52


def test_sizes_of_which_no_layer_fits_are_left_out() -> None:
    job = Job("j", preset("opt-125m"), 2**40, 128, precision="bf16", optimizer="adam")
    pool = Pool("us-central1-a", "A100-80", "a2-ultragpu-8g", 8, 1)
    tables = ReplanTables(job, Cluster((pool,), load_catalogue()), Measurements())
    sizes = tables.templates_of(Plan(1, ())).micro_batches
    assert sizes[:8] == (1, 2, 4, 8, 16, 32, 64, 128)
    assert 256 <= sizes[-1] < 2**16


@pytest.mark.parametrize("goal", ["throughput", "cost"])
def test_starts_of_small_changes_are_ranked_by_how_far_they_break_limits(goal: str) -> None:
    """Also where all GPUs are free, and where no plan can keep a limit."""

    def start(score: tuple[float, ...], seconds: float, usd: float) -> JudgedPlan:
        figures = SimpleNamespace(iteration_s=seconds, money=SimpleNamespace(total_usd=usd))
        return JudgedPlan(score, None, None, figures)  # type: ignore[arg-type] # nothing else is read

    search = SimpleNamespace(limits=SimpleNamespace(goal_is_cost=goal == "cost"))
    ranked = [
        start((math.inf, 1.01, 1), 5.0, 0.5),  # 1 % above a limit counts as 4 % worse.
        start((6.0 if goal == "throughput" else 0.6, 0.0, 1), 6.0, 0.6),
        start((math.inf, 1.5, 1), 5.0, 0.5),
        start((math.inf, math.inf, 1), 1.0, 0.1),
    ]
    promises = [EventSearch._promise(search, one) for one in ranked]  # type: ignore[arg-type] # its limits suffice
    assert promises == sorted(promises)
    assert promises[-1][0] == math.inf
    if goal == "cost":
        free = [start((0.0, 5.0, 1), 5.0, 0.0), start((math.inf, math.inf, 1), 1.0, 0.0)]
        promises = [EventSearch._promise(search, one) for one in free]  # type: ignore[arg-type] # its limits suffice
        assert promises == sorted(promises)
        assert not any(math.isnan(x) for each in promises for x in each)
