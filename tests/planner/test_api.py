"""Questions at the edges of what the planner is asked."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace

import pytest

from planner.api import plan_job
from planner.problem.question import Question
from simulator.spec.job import Objective
from tests.planner.small_cases import random_case


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["paper", "event"])
def test_gpus_that_cost_nothing_are_planned_for_the_goal_cost(estimator: str) -> None:
    """No share says how much worse another plan is than one that costs nothing."""
    planned = 0
    for seed in range(6):
        case = random_case(random.Random(f"free {seed}"), gpus_max=4, layers_max=5)
        pools = tuple(replace(pool, price_usd_per_gpu_hour=0.0) for pool in case.cluster.pools)
        job = replace(case.job, objective=Objective(goal="cost"))
        cluster = replace(case.cluster, pools=pools)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            answer = plan_job(
                Question(job, cluster, case.measurements, estimator=estimator, budget=20)
            )
        if answer.estimate is not None and answer.estimate.money.total_usd == 0:
            planned += 1
            assert answer.lower_bound == 0
            assert all(rejected.loses is None for rejected in answer.rejected)
            assert answer.explain
    assert planned > 2
