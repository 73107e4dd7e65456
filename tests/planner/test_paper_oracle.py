"""The planner under the paper estimator against every plan that there is."""

from __future__ import annotations

import random

import pytest

from planner.answer import Question
from planner.sailor import plan_job
from tests.planner.small_cases import SmallCase, every_common_plan, is_possible, random_case


def oracle(case: SmallCase) -> tuple[float, float] | None:
    """The least objective and the least seconds over all plans."""
    best: float | None = None
    fastest = float("inf")
    for plan in every_common_plan(case):
        estimate = case.paper(plan)
        if estimate is None or not estimate.fits or not is_possible(case, plan):
            continue
        value = estimate.iteration_s
        if case.job.objective.goal == "cost":
            assert estimate.money.total_usd is not None
            value = estimate.money.total_usd
        fastest = min(fastest, estimate.iteration_s)
        best = value if best is None else min(best, value)
    return None if best is None else (best, fastest)


@pytest.mark.sim
@pytest.mark.parametrize("goal", ["throughput", "cost"])
def test_no_plan_is_better_than_the_planners(goal: str, examples: int) -> None:
    for seed in range(max(1, examples // 2)):
        rng = random.Random(f"paper {goal} {seed}")
        case = random_case(rng, gpus_max=4, layers_max=4, batch=rng.choice([2, 4]), goal=goal)
        answer = plan_job(Question(case.job, case.cluster, case.measurements, "paper"))
        expected = oracle(case)
        if expected is None:
            assert answer.plan is None, seed
            continue
        assert answer.plan is not None, seed
        assert answer.objective == pytest.approx(expected[0], rel=1e-9), seed
        assert answer.lower_bound <= expected[0] * (1 + 1e-9), seed
        assert answer.lower_bound_s <= expected[1] * (1 + 1e-9), seed
