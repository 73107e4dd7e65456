"""Tight limits: a plan that keeps them is found if there is one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from planner.api import plan_job
from planner.problem.question import Answer, Question
from simulator.estimate.result import Estimate
from simulator.spec.job import Objective
from tests.planner.search.test_oracle import every_plan
from tests.planner.small_cases import SmallCase, is_possible, random_case


def ask(case: SmallCase, **objective: Any) -> Answer:
    job = replace(case.job, objective=Objective(**objective))
    return plan_job(Question(job, case.cluster, case.measurements, "event"))


def usd_of(estimate: Estimate) -> float:
    assert estimate.money.total_usd is not None
    return estimate.money.total_usd


@pytest.mark.sim
def test_tight_limits_give_the_best_plan_that_keeps_them(examples: int) -> None:
    for seed in range(max(1, examples // 10)):
        rng = random.Random(f"edge {seed}")
        case = random_case(rng, gpus_max=3, layers_max=4, batch=rng.choice([2, 4]))
        judge = case.judge
        every = (judge.estimate(plan) for plan in every_plan(case) if is_possible(case, plan))
        figures = sorted({(usd_of(e), e.iteration_s) for e in every if e.fits})
        if not figures:
            continue
        # Among the cheapest plans, and among the fastest.
        most_usd = figures[rng.randrange(min(4, len(figures)))][0]
        quick = sorted(seconds for _, seconds in figures)[rng.randrange(min(4, len(figures)))]
        best_s = min(seconds for usd, seconds in figures if usd <= most_usd)
        best_usd = min(usd for usd, seconds in figures if seconds <= quick)
        kept = ask(case, goal="throughput", max_usd_per_iteration=most_usd)
        assert kept.objective == pytest.approx(best_s, rel=1e-9), seed
        kept = ask(case, goal="cost", min_iterations_per_s=1 / quick * (1 - 1e-12))
        assert kept.objective == pytest.approx(best_usd, rel=1e-9), seed
        refused = ask(case, goal="throughput", max_usd_per_iteration=figures[0][0] * 0.999)
        assert refused.plan is None, seed
        assert "max_usd_per_iteration" in str(refused.problems[0]), seed


@pytest.mark.slow
@pytest.mark.sim
def test_a_plan_found_for_one_goal_is_found_under_its_figures_as_limit(examples: int) -> None:
    """More GPUs than are searched to the end; seed 6 once had no plan as quick as the fastest."""
    seeds = [6] if examples <= 50 else range(max(1, examples // 20))
    for seed in seeds:
        rng = random.Random(f"edge {seed}")
        case = random_case(rng, gpus_max=24, layers_max=8, batch=rng.choice([8, 16, 32]))
        cheap, fast = ask(case, goal="cost").estimate, ask(case, goal="throughput").estimate
        if cheap is None or fast is None:
            continue
        pace = 0.999 / fast.iteration_s
        most_usd = usd_of(cheap) * 1.0001
        limits: tuple[dict[str, Any], ...] = (
            {"goal": "throughput", "max_usd_per_iteration": most_usd},
            {"goal": "throughput", "max_usd_per_hour": most_usd / cheap.iteration_s * 3600},
            {"goal": "cost", "min_iterations_per_s": pace},
        )
        for objective in limits:
            assert ask(case, **objective).plan is not None, (seed, objective)


@pytest.mark.slow
@pytest.mark.sim
def test_more_gpus_never_make_a_complete_search_worse(examples: int) -> None:
    finished = 0
    for seed in range(max(4, examples // 15)):
        rng = random.Random(f"more {seed}")
        goal = rng.choice(["throughput", "cost"])
        case = random_case(rng, gpus_max=4, layers_max=5, batch=rng.choice([4, 8]))
        before = ask(case, goal=goal)
        number = rng.randrange(len(case.cluster.pools))
        pools = tuple(
            replace(pool, gpus=pool.gpus + (index == number))
            for index, pool in enumerate(case.cluster.pools)
        )
        larger = replace(case, cluster=replace(case.cluster, pools=pools))
        after = ask(larger, goal=goal)
        if before.objective is None or before.gap != pytest.approx(0.0, abs=1e-9):
            continue
        finished += 1
        assert after.objective is not None, seed
        assert after.objective <= before.objective * (1 + 1e-12), seed
    assert finished
