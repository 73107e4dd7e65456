"""Limits in dollars that only the price of spot GPUs keeps, where a place has both contracts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.api import SPOT_FIRST, asked_with_spot_first, best_answer, find_plan, plan_job
from planner.cost_frontier import frontier
from planner.problem.question import Answer, Question
from planner.search.search_cache import SearchCache
from planner.what_if import BUDGET_SHARE, explained
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.models.families import build_model
from simulator.spec.job import Job, Objective

ON_DEMAND = Pool(
    "us-central1-a", "T4", "T4x2", 2, 4, price_usd_per_gpu_hour=3.0, price_source="cluster file"
)
SPOT = replace(ON_DEMAND, gpus=8, spot=True, price_usd_per_gpu_hour=1.0)
MODEL = build_model("gpt2", layers=4, hidden=512, heads=4, vocab=512, sequence=256)


def asked(*pools: Pool, **limits: float) -> Question:
    job = Job("both", MODEL, 64, 256, objective=Objective(**limits))  # type: ignore[arg-type]  # names of limits
    cluster = Cluster(pools or (ON_DEMAND, SPOT), load_catalogue())
    return Question(job, cluster, Measurements(), budget=60, is_bounded=False)


def usd_per_hour(answer: Answer) -> float:
    assert answer.estimate is not None
    assert answer.estimate.money.total_usd is not None
    return answer.estimate.money.total_usd / answer.estimate.iteration_s * 3600


@pytest.mark.parametrize("most", [1.0, 2.5])
def test_a_limit_that_pays_for_spot_gpus_only_has_a_plan_and_a_note(most: float) -> None:
    answer = plan_job(asked(max_usd_per_hour=most))
    assert answer.plan is not None, answer.problems
    assert usd_per_hour(answer) == pytest.approx(answer.plan.device_count * 1.0)
    assert usd_per_hour(answer) <= most
    assert answer.pays_spot_first
    assert answer.estimate is not None
    assert SPOT_FIRST in answer.estimate.notes
    # The plan is as fast as on a cluster with spot GPUs alone.
    alone = plan_job(asked(SPOT, max_usd_per_hour=most))
    assert answer.objective == alone.objective


def test_one_more_machine_is_searched_in_the_order_of_the_answer() -> None:
    """Two spot GPUs keep the limit, so do four, and none on demand."""
    few, more = (replace(SPOT, gpus=gpus) for gpus in (2, 4))
    question = asked(ON_DEMAND, few, max_usd_per_iteration=2.6e-4)
    answer = plan_job(question)
    assert answer.pays_spot_first
    gains = explained(question, answer).why.one_more
    other = asked_with_spot_first(asked(ON_DEMAND, more, max_usd_per_iteration=2.6e-4))
    assert other is not None
    found = find_plan(replace(other, budget=60 // BUDGET_SHARE), SearchCache())
    assert found.estimate is not None
    (on_spot,) = (gain for gain in gains if gain.seconds_gained > 0)
    assert on_spot.iteration_s == found.estimate.iteration_s


def test_on_demand_gpus_are_paid_first_where_the_limits_allow_it() -> None:
    for limits in ({}, {"max_usd_per_hour": 3.0}, {"max_usd_per_hour": 2.5, "max_spot_share": 0.5}):
        answer = best_answer(asked(**limits), SearchCache())
        assert not answer.pays_spot_first
        assert (answer.plan is None) == ("max_spot_share" in limits)


def test_a_limit_below_the_cheapest_spot_gpu_is_refused_with_its_price() -> None:
    (problem,) = plan_job(asked(max_usd_per_hour=0.5)).problems
    assert problem.place == "objective.max_usd_per_hour"
    assert "needs 1 (" in problem.what
    assert problem.cure == "raise it by 100%"


def test_the_price_of_a_refused_limit_is_that_of_the_cheapest_plan_per_hour() -> None:
    """On a faster GPU an iteration costs less, and an hour more."""
    slow = replace(ON_DEMAND, price_usd_per_gpu_hour=1.0)
    fast = replace(slow, gpu="A100-40", machine="A100-40x2", price_usd_per_gpu_hour=2.0)
    cheapest = plan_job(replace_goal(asked(slow, fast)))
    assert usd_per_hour(cheapest) >= 2.0
    (problem,) = plan_job(asked(slow, fast, max_usd_per_hour=0.8)).problems
    assert problem.what.startswith("is 0.8, and the cheapest plan per hour that keeps the other")
    assert "needs 1 (" in problem.what
    assert problem.cure == "raise it by 25%"


def replace_goal(question: Question) -> Question:
    objective = replace(question.job.objective, goal="cost")
    return replace(question, job=replace(question.job, objective=objective))


def test_the_frontier_of_a_limit_that_pays_for_spot_only_is_not_empty() -> None:
    found = frontier(asked(max_usd_per_hour=2.5), points=3)
    assert found.points
    assert all(point.usd_per_hour <= 2.5 for point in found.points)
