"""Why there is no plan, from the answers to easier questions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from planner.api import plan_job
from planner.explain.infeasible import refusals
from planner.problem.objective import Limits
from planner.problem.question import Question
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool, Quota
from simulator.hardware.catalogue import load_catalogue
from simulator.models.families import build_model
from simulator.spec.job import Job, Objective

PACE, NEXT_S = 5.004807362210215, 0.19980789021985088
"""The next float above ``1 / PACE``, whose product with ``PACE`` is rounded to 1."""


def refused(
    objective: Objective, fastest_s: float, *, usd: float = 0.0, **limits: Any
) -> list[str]:
    """The problems if every easier question has a plan of ``fastest_s`` seconds and dollars."""
    money = SimpleNamespace(total_usd=usd)
    estimate = SimpleNamespace(iteration_s=fastest_s, money=money)
    found = cast("Any", SimpleNamespace(estimate=estimate, plan=object()))
    job = cast("Job", SimpleNamespace(objective=objective))
    asked = refusals(job, (), Limits(objective, **limits), lambda *_, **__: found, lambda _: 0.0)
    return [str(problem) for problem in asked]


def test_a_pace_that_the_fastest_plan_just_keeps_is_not_in_the_way() -> None:
    assert 1 / PACE < NEXT_S
    assert NEXT_S * PACE == 1
    (said,) = refused(Objective(min_iterations_per_s=PACE), NEXT_S)
    assert "no plan that was judged keeps all limits together" in said


@pytest.mark.parametrize(
    ("objective", "limits", "said"),
    [
        (Objective(min_iterations_per_s=2.0), {}, "lower it by 50%"),
        (Objective(min_iterations_per_s=1e5), {}, "lower it to 1"),
        (Objective(deadline="2030-01-01"), {"steps": 10, "seconds_left": 4.0}, "move it by 6 s"),
    ],
)
def test_the_limit_that_the_fastest_plan_breaks_is_named(
    objective: Objective, limits: dict[str, Any], said: str
) -> None:
    (found,) = refused(objective, 1.0, **limits)
    assert said in found


@pytest.mark.parametrize(
    ("usd", "raised"), [(1234.4, "1235"), (0.012341, "0.01235"), (999.96, "1000"), (0.36, "0.36")]
)
def test_what_a_limit_in_dollars_is_raised_to_is_enough(usd: float, raised: str) -> None:
    (said,) = refused(Objective(max_usd_per_iteration=usd / 1000), 1.0, usd=usd)
    assert said.endswith(f"; raise it to {raised}")
    assert float(raised) >= usd


def asked(job: Job, *pools: Pool, quotas: tuple[Quota, ...] = ()) -> list[str]:
    cluster = Cluster(pools, load_catalogue(), quotas=quotas)
    answer = plan_job(Question(job, cluster, Measurements(), budget=60, is_bounded=False))
    assert answer.plan is None
    return [str(problem) for problem in answer.problems]


def test_a_quota_in_the_way_is_named_instead_of_the_memory() -> None:
    small = build_model("gpt2", layers=2, hidden=64, heads=2, vocab=256, sequence=64)
    pool = Pool("us-central1-a", "A100-40", "A100-40x1", 1, 4)
    said = asked(Job("small", small, 8, 64), pool, quotas=(Quota("us-central1", "A100-40", 0),))
    assert said == [
        "quota: leaves 0 A100-40 in us-central1, and no plan fits on that; "
        "raise gpus_max, or give GPUs that it does not limit"
    ]


def test_a_micro_batch_that_is_too_large_is_named_with_one_that_fits() -> None:
    long = build_model("gpt2", layers=1, hidden=1024, heads=16, vocab=50_257, sequence=2048)
    pool = Pool("us-central1-a", "V100-16", "V100-16x1", 1, 2)
    (said,) = asked(Job("long", long, 128, 2048, micro_batches=(128,)), pool)
    assert "does not fit on the 2 GPUs (2 x V100-16@us-central1-a) in micro batches of 128" in said
    assert "to training.micro_batches, which fits" in said
    assert "the runtime leaves 15.4 GB of each V100-16 for them and for activations" in said
