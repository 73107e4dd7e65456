"""Zero-bubble plans are tried and bounded where they are asked for, and taken where they gain."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from planner.api import plan_job
from planner.problem.inventory import lots_of
from planner.problem.question import SEARCHED, Question
from planner.search.round_trips import RoundTrips
from planner.search.zero_bubble import divided
from simulator.api import Measurements, estimator
from simulator.arrays import Floats
from simulator.estimate.event_estimator import EventEstimator
from simulator.inputs.plan_check import check_plan
from simulator.layer_costs.roofline import Roofline
from simulator.spec.job import Goal
from tests.planner.search.test_chunks import ASKED, CLUSTER, JOB, plan_of
from tests.planner.search.test_oracle import every_unplaced_plan, oracle_case
from tests.planner.search.tight_plans import keeps_bound, least_of, tables_of
from tests.simulator.worlds import random_plan, random_world

FEW = replace(ASKED, job=replace(JOB, global_batch=8))
BOTH = SEARCHED["event", "zero-bubble"]
TABLES = partial(tables_of, divides=True)


def asked(question: Question) -> Question:
    return replace(question, tries=("zero-bubble",))


def test_divided_backwards_are_taken_only_where_they_are_allowed() -> None:
    plain, found = plan_job(FEW), plan_job(asked(FEW))
    assert plain.plan is not None
    assert found.plan is not None
    assert (plain.plan.schedule, found.plan.schedule) == ("1f1b", "zero-bubble")
    assert plain.objective is not None
    assert found.objective is not None
    assert found.objective < 0.95 * plain.objective
    assert (plain.gains, found.space) == ((), BOTH)
    (gain,) = found.gains
    assert (gain.best, gain.without) == (found.objective, plain.objective)
    assert "no runtime runs them yet" in str(gain)


def test_the_estimate_of_a_chosen_plan_is_that_of_its_file() -> None:
    found = plan_job(asked(FEW))
    assert found.plan is not None
    assert found.estimate is not None
    assert check_plan(found.plan, FEW.job, CLUSTER) == ()
    judge = estimator("event", job=FEW.job, cluster=CLUSTER, measurements=Measurements())
    assert judge.estimate(found.plan).iteration_s == found.estimate.iteration_s


def test_a_wait_that_hardly_counts_leaves_the_plan_as_it_was() -> None:
    """With many micro batches what the divided backward keeps costs more than the wait."""
    many = replace(FEW, job=replace(JOB, global_batch=128))
    plain, found = plan_job(many), plan_job(asked(many))
    assert found.plan == plain.plan
    (gain,) = found.gains
    assert gain.best is not None
    assert gain.without is not None
    assert gain.best > gain.without


def test_limit_that_only_divided_backwards_keep_is_kept() -> None:
    plain, found = plan_job(FEW), plan_job(asked(FEW))
    assert plain.objective is not None
    assert found.objective is not None
    rate = 2 / (plain.objective + found.objective)
    job = replace(FEW.job, objective=replace(JOB.objective, min_iterations_per_s=rate))
    assert plan_job(replace(FEW, job=job)).plan is None
    kept = plan_job(asked(replace(FEW, job=job, is_bounded=True)))
    assert kept.plan is not None
    assert kept.plan.schedule == "zero-bubble"
    assert kept.gains[0].without is None


def test_simple_plans_are_preferred_to_a_gain_of_less_than_two_percent() -> None:
    one, other = (plan_job(replace(asked(FEW), prefer=how)) for how in ("simple", "fastest"))
    assert one.plan is not None
    assert other.plan is not None
    assert (one.plan.schedule, other.plan.schedule) == ("zero-bubble", "zero-bubble")


def test_the_bound_of_a_small_case_counts_divided_backwards() -> None:
    """A search to the end judged all plans under 1F1B only."""
    found = plan_job(asked(replace(FEW, is_bounded=True, proves=True)))
    assert found.space == BOTH
    assert found.objective is not None
    assert 0 < found.lower_bound <= found.objective


# The bound -----------------------------------------------------------------------------------


def put_shares(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Let the gradient of the weights take any share of each layer's backward."""
    rng = random.Random(f"shares {seed}")
    each = [rng.choice([0.0, 0.5, 1.0, rng.random()]) for _ in range(100)]

    def shares(roofline: Roofline, gpu: str, *, tp: int, micro_batch: int) -> Floats:  # noqa: ARG001 - the method has it
        return np.array(each[tp:][: len(roofline.model.layers)])

    monkeypatch.setattr(Roofline, "weight_shares", shares)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_each_stage_of_a_deep_pipeline_keeps_its_limits(
    share: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where messages take little time, nothing hides a limit that is too strict."""

    def shares(roofline: Roofline, gpu: str, *, tp: int, micro_batch: int) -> Floats:  # noqa: ARG001 - the method has it
        return np.full(len(roofline.model.layers), share)

    monkeypatch.setattr(Roofline, "weight_shares", shares)
    job = replace(JOB, global_batch=count)
    judge = estimator("event", job=job, cluster=CLUSTER, measurements=Measurements())
    assert isinstance(judge, EventEstimator)
    plan = divided(plan_of((0, 5, 9, 13, 17, 21, 25, 29, 34), count))
    seconds = judge.estimate(plan).iteration_s * (1 + 1e-9)
    tables = TABLES(judge, lots_of(CLUSTER, judge.facts), "full", degrees=(1,))
    most, stages = tables.most(1, seconds, 1, 1), plan.pipelines[0].stages
    choice = tables.index_of("A100-40", 1)
    for s, each in enumerate(stages):
        assert most[len(stages) - 1 - s, choice, *each.layers] >= count, s
    trips = RoundTrips.of(tables, 1, 1, 1)
    prices = np.array([float(each.tp) for each in tables.choices])
    found, _ = trips.prices(seconds, np.array([count]), prices, highest=20.0, stages_max=99)
    assert found[0] <= len(stages)


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("goal", ["throughput", "cost"])
def test_no_plan_is_below_the_bound(
    goal: Goal, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(max(1, examples // 10)):
        put_shares(monkeypatch, seed)
        rng = random.Random(f"divided bound {goal} {seed}")
        world = random_world(rng)
        plan = random_plan(rng, world, schedules=("zero-bubble",), splits=False)
        if rng.random() < 0.5:
            # Equal pipelines come closest to the bound.
            plan = replace(plan, pipelines=(plan.pipelines[0],) * len(plan.pipelines))
        keeps_bound(rng, world, plan, goal, TABLES, seed)


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("goal", ["throughput", "cost"])
def test_no_plan_of_a_small_case_is_below_its_bound(
    goal: Goal, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All plans of a case, with whole and with divided backwards."""
    gained = 0
    for seed in range(max(20, examples // 2)):
        put_shares(monkeypatch, seed)
        case = oracle_case(goal, seed)
        judge = case.judge
        both = (way for plan in every_unplaced_plan(case) for way in (plan, divided(plan)))
        least = least_of(case, judge, both, lambda plan: plan.schedule)
        if least.score == math.inf:
            continue
        gained += least.scores["zero-bubble"] < least.scores["1f1b"] * (1 - 1e-9)
        tables = TABLES(judge, lots_of(case.cluster, judge.facts), "none")
        least.is_above_bound(case, tables, seed)
        answer = plan_job(
            Question(case.job, case.cluster, case.measurements, tries=("zero-bubble",))
        )
        assert answer.objective is not None, seed
        assert answer.objective <= least.scores["1f1b"] * (1 + 1e-9), seed
        least.is_above(answer, seed)
    assert gained
