"""No plan with outer steps is below the bound that covers them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import pytest

from planner.api import plan_job
from planner.problem.inventory import lots_of
from planner.problem.objective import Limits
from planner.problem.question import Question
from planner.search.bound import EventBound
from simulator.api import estimator
from simulator.estimate.event_estimator import EventEstimator
from simulator.spec.job import Goal
from tests.planner.search.test_oracle import every_unplaced_plan, oracle_case
from tests.planner.search.tight_plans import keeps_bound, least_of, tables_of
from tests.planner.test_outer_answer import ASKED, JOB
from tests.simulator.estimate.test_outer_steps import random_grouped
from tests.simulator.worlds import random_world

EVERY = 20
TABLES = partial(tables_of, takes_outer_steps=True)


def test_a_bound_that_counts_sums_would_be_beaten() -> None:
    """One GPU in each of two zones: two pipelines could only sum across them."""
    pools = tuple(replace(each, machine="V100-16x1", gpus_per_machine=1, gpus=1)
                  for each in ASKED.cluster.pools)  # fmt: skip
    asked = replace(ASKED, cluster=replace(ASKED.cluster, pools=pools), is_bounded=False)
    found = plan_job(asked)
    assert found.plan is not None
    assert found.estimate is not None
    assert found.plan.outer_every == 50
    seconds = found.estimate.iteration_s
    judge = estimator("event", job=JOB, cluster=asked.cluster, measurements=asked.measurements)
    assert isinstance(judge, EventEstimator)
    lots, sizes = lots_of(asked.cluster, judge.facts), [1, 2, 4, 8, 16, 32, 64]
    bounds = {
        takes: EventBound(
            tables_of(judge, lots, "none", (1,), takes_outer_steps=takes),
            lots,
            (),
            Limits(JOB.objective),
            JOB.global_batch,
            sizes,
        ).bounds(2 * seconds, 2 * seconds)
        for takes in (True, False)
    }
    assert bounds[True].seconds <= seconds < bounds[False].seconds


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("goal", ["throughput", "cost"])
def test_no_plan_is_below_the_bound(goal: Goal, examples: int) -> None:
    for seed in range(max(1, examples // 10)):
        rng = random.Random(f"outer bound {goal} {seed}")
        world = random_world(rng)
        plan, _ = random_grouped(rng, world, 10**6, schedules=("1f1b",), splits=False)
        keeps_bound(rng, world, plan, goal, TABLES, seed)


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("goal", ["throughput", "cost"])
def test_no_plan_of_a_small_case_is_below_its_bound(goal: Goal, examples: int) -> None:
    """All plans of a case, with outer steps and without."""
    gained = 0
    for seed in range(max(20, examples // 2)):
        case = oracle_case(goal, seed)
        if len({pool.zone for pool in case.cluster.pools}) == 1:
            continue
        both = (
            way
            for plan in every_unplaced_plan(case)
            for way in dict.fromkeys((plan, plan.with_outer_steps(EVERY)))
        )
        least = least_of(case, case.judge, both, lambda plan: str(plan.outer_every))
        if least.score == math.inf:
            continue
        gained += least.scores[str(EVERY)] < least.scores["None"] * (1 - 1e-9)
        answer = plan_job(
            Question(
                case.job,
                case.cluster,
                case.measurements,
                tries=("outer-steps",),
                outer_every=EVERY,
            )
        )
        assert answer.objective is not None, seed
        assert answer.objective <= least.scores["None"] * (1 + 1e-9), seed
        least.is_above(answer, seed)
    # One pipeline is often the cheapest: then there is nothing to sum.
    assert gained or goal == "cost"
