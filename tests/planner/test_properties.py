"""Invariants of every answer: supply, batch, order of pools, limits, and reasons of refusal."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from planner.api import plan_job
from planner.problem.question import Answer, Question
from simulator.cluster.cluster import Cluster
from simulator.documents.problems import InputError
from simulator.inputs.plan_check import check_plan
from simulator.spec.job import Objective
from tests.planner.small_cases import SmallCase, random_case

ESTIMATORS = ("paper", "event")


def ask(case: SmallCase, estimator: str, **objective: Any) -> Answer:
    job = replace(case.job, objective=Objective(**objective))
    return plan_job(Question(job, case.cluster, case.measurements, estimator))


def cases(examples: int, estimator: str) -> list[SmallCase]:
    """More GPUs than an exhaustive search allows, so that the heuristics are tested too."""
    found = []
    for seed in range(max(1, examples // 40)):
        rng = random.Random(f"properties {estimator} {seed}")
        found.append(random_case(rng, gpus_max=24, layers_max=8, batch=rng.choice([7, 12, 32])))
    return found


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_plans_fit_the_supply_and_meet_the_batch(estimator: str, examples: int) -> None:
    for number, case in enumerate(cases(examples, estimator)):
        answer = ask(case, estimator, goal="throughput")
        if answer.plan is None:
            assert answer.problems, number
            continue
        assert not check_plan(answer.plan, case.job, case.cluster), number
        assert answer.plan.samples_per_iteration == case.job.global_batch
        assert answer.estimate is not None
        assert answer.estimate.fits
        assert answer.objective is not None
        assert answer.lower_bound <= answer.objective * (1 + 1e-9)
        assert answer.why


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_order_of_pools_changes_nothing(estimator: str, examples: int) -> None:
    for number, case in enumerate(cases(examples, estimator)):
        shuffled = Cluster(case.cluster.pools[::-1], case.cluster.catalogue)
        other = SmallCase(case.job, shuffled, case.measurements)
        assert (
            ask(case, estimator, goal="throughput").plan
            == ask(other, estimator, goal="throughput").plan
        ), number


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_limit_is_kept_and_never_makes_a_plan_better(estimator: str, examples: int) -> None:
    for number, case in enumerate(cases(examples, estimator)):
        free = ask(case, estimator, goal="throughput")
        if free.estimate is None or free.estimate.money.total_usd is None:
            continue
        most = 0.9 * free.estimate.money.total_usd
        tight = ask(case, estimator, goal="throughput", max_usd_per_iteration=most)
        if tight.estimate is None:
            assert tight.problems, number
            continue
        assert tight.estimate.money.total_usd is not None
        assert tight.estimate.money.total_usd <= most
        assert tight.estimate.iteration_s >= free.lower_bound_s * (1 - 1e-9)
        pace = 0.5 / free.estimate.iteration_s
        cheap = ask(case, estimator, goal="cost", min_iterations_per_s=pace)
        if cheap.estimate is not None:
            assert cheap.estimate.iteration_s * pace <= 1 + 1e-12, number


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_cost_goal_needs_prices_and_throughput_does_not(estimator: str) -> None:
    case = random_case(random.Random("prices"), gpus_max=2, layers_max=3)
    pools = tuple(
        replace(pool, price_usd_per_gpu_hour=None, price_source="unknown")
        for pool in case.cluster.pools
    )
    unpriced = SmallCase(case.job, Cluster(pools, case.cluster.catalogue), case.measurements)
    assert ask(unpriced, estimator, goal="throughput").plan is not None
    with pytest.raises(InputError, match="no price is known"):
        ask(unpriced, estimator, goal="cost")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_conflicting_limits_are_both_named(estimator: str) -> None:
    case = random_case(random.Random("prices"), gpus_max=2, layers_max=3)
    answer = ask(
        case, estimator, goal="throughput", max_usd_per_iteration=1e-9, min_iterations_per_s=1e9
    )
    assert answer.plan is None
    said = "\n".join(map(str, answer.problems))
    assert "max_usd_per_iteration" in said
    assert "min_iterations_per_s" in said


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_batch_of_one_and_an_empty_cluster(estimator: str) -> None:
    case = random_case(random.Random("prices"), gpus_max=2, layers_max=3)
    one = SmallCase(replace(case.job, global_batch=1), case.cluster, case.measurements)
    answer = ask(one, estimator, goal="throughput")
    assert answer.plan is not None
    assert answer.plan.samples_per_iteration == 1
    empty = SmallCase(case.job, Cluster((), case.cluster.catalogue), case.measurements)
    with pytest.raises(InputError, match="no GPU that is up"):
        ask(empty, estimator, goal="throughput")
