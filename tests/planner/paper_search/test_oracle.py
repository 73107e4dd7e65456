"""The planner under the paper estimator against all plans of small cases."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from planner.api import plan_job
from planner.paper_search.bound import lower_bounds
from planner.paper_search.formula_tables import PaperModel
from planner.paper_search.search import PaperSearch
from planner.problem.inventory import lots_of
from planner.problem.objective import Limits
from planner.problem.question import Question
from simulator.cluster.cluster import Cluster
from simulator.cluster.place_facts import PlaceFacts
from simulator.network.network import Network
from simulator.spec.job import Objective
from tests.planner.paper_search.plain_formula import Outcome, outcomes
from tests.planner.small_cases import SmallCase, every_common_plan, is_possible, random_case

FOUND = (645,)
"""Cases that once were answered wrongly."""


def small_cases(examples: int) -> Iterator[tuple[int, SmallCase, list[Outcome]]]:
    for seed in (*FOUND, *range(examples)):
        rng = random.Random(f"oracle {seed}")
        large = seed % 40 == 39
        case = random_case(
            rng,
            gpus_max=5 if large else rng.choice([2, 3, 4]),
            layers_max=6 if large else 5,
            batch=rng.choice([2, 4, 6]),
        )
        yield seed, case, outcomes(case)


def objectives(every: list[Outcome]) -> list[Objective]:
    """Both goals, freely and within limits that some plans keep."""
    by_usd = sorted(outcome.usd for outcome in every)
    by_seconds = sorted(outcome.seconds for outcome in every)
    return [
        Objective(goal="throughput"),
        Objective(goal="cost"),
        Objective(goal="throughput", max_usd_per_iteration=by_usd[len(by_usd) // 4] * 1.0001),
        Objective(goal="cost", min_iterations_per_s=0.9999 / by_seconds[len(by_seconds) // 4]),
    ]


def best_of(every: list[Outcome], objective: Objective) -> tuple[float, float]:
    """The least objective and the least seconds of plans that keep the limits."""
    kept = [
        outcome
        for outcome in every
        if outcome.usd <= (objective.max_usd_per_iteration or float("inf"))
        and outcome.seconds * (objective.min_iterations_per_s or 0.0) <= 1
    ]
    costs = objective.goal == "cost"
    return (
        min(outcome.usd if costs else outcome.seconds for outcome in kept),
        min(outcome.seconds for outcome in kept),
    )


@pytest.mark.slow
@pytest.mark.sim
def test_no_plan_is_better_than_the_planners(examples: int) -> None:
    for seed, case, every in small_cases(2 * examples):
        if not every:
            answer = plan_job(Question(case.job, case.cluster, case.measurements, "paper"))
            assert answer.plan is None, seed
            assert answer.problems, seed
            continue
        for objective in objectives(every):
            job = replace(case.job, objective=objective)
            answer = plan_job(Question(job, case.cluster, case.measurements, "paper"))
            best, quickest = best_of(every, objective)
            assert answer.plan is not None, (seed, objective)
            assert answer.objective == pytest.approx(best, rel=1e-9), (seed, objective)
            assert answer.lower_bound <= best * (1 + 1e-9), (seed, objective)
            assert answer.lower_bound_s <= quickest * (1 + 1e-9), (seed, objective)


@pytest.mark.sim
def test_no_plan_is_below_the_bound(examples: int) -> None:
    """The bound alone, as used where there are too many plans to judge."""
    tight = 0
    for seed, case, every in small_cases(2 * examples):
        if not every:
            continue
        for objective in objectives(every):
            best, quickest = best_of(every, objective)
            search = search_of(case, objective)
            known = (1.5 * quickest, 1.5 * best)
            if objective.goal == "throughput":
                known = (1.5 * best, 1.5 * best)
            bounds = lower_bounds(
                search.model,
                search.hopeful_families(),
                search.limits,
                seconds=known[0],
                objective=known[1],
            )
            assert bounds.seconds <= quickest * (1 + 1e-9), (seed, objective)
            assert bounds.objective <= best * (1 + 1e-9), (seed, objective)
            tight += bounds.objective >= 0.9 * best
    assert tight > examples, "a bound of nothing would hold as well"


def test_without_a_known_plan_the_bound_is_that_of_the_families(examples: int) -> None:
    """Under a tight budget no plan is known, so that nothing limits the cells of time."""
    for seed in range(examples):
        case = random_case(random.Random(f"unknown {seed}"), gpus_max=4, layers_max=5)
        for goal in ("throughput", "cost"):
            search = search_of(case, Objective(goal=goal, max_usd_per_iteration=1e-9))
            families, inf = search.hopeful_families(), float("inf")
            bounds = lower_bounds(search.model, families, search.limits, seconds=inf, objective=inf)
            least = min((float(family.score.min()) for family in families), default=inf)
            assert bounds.objective == least, (seed, goal)


def search_of(case: SmallCase, objective: Objective) -> PaperSearch:
    facts = PlaceFacts(case.cluster, case.measurements.network)
    lots = lots_of(case.cluster, facts)
    catalogue = case.cluster.catalogue
    model = PaperModel(
        case.profile,
        Network(catalogue, case.measurements.network),
        lots,
        tuple(float(catalogue.gpu(lot.gpu).memory_bytes) for lot in lots),
        case.job.global_batch,
        facts.usd_per_hour,
    )
    sizes = tuple(b for b in (1, 2, 4) if case.job.global_batch % b == 0)
    return PaperSearch(model, Limits(objective), (), sizes, (1, 2, 4), 2000)


@pytest.mark.parametrize("seed", range(4))
def test_the_plain_formula_equals_the_estimator(seed: int) -> None:
    case = random_case(random.Random(f"plain {seed}"), gpus_max=3, layers_max=3, batch=4)
    estimated = set()
    for plan in every_common_plan(case):
        estimate = case.paper(plan)
        if estimate is not None and estimate.fits and is_possible(case, plan):
            estimated.add(float(f"{estimate.iteration_s:.9g}"))
    # Micro batches that are divided less evenly take longer, which the plain one leaves out.
    plain = {float(f"{outcome.seconds:.9g}") for outcome in outcomes(case)}
    assert plain
    assert plain <= estimated
    assert min(plain) == min(estimated)


@pytest.mark.sim
@pytest.mark.parametrize("goal", ["throughput", "cost"])
def test_more_gpus_are_never_worse_and_tighter_limits_never_better(
    goal: str, examples: int
) -> None:
    for seed in range(max(4, examples // 5)):
        case = random_case(random.Random(f"grown {seed}"), gpus_max=5, layers_max=5, goal=goal)
        pool, *others = case.cluster.pools
        grown = Cluster(
            (replace(pool, gpus=pool.gpus + pool.gpus_per_machine), *others), case.cluster.catalogue
        )
        before = plan_job(Question(case.job, case.cluster, case.measurements, "paper"))
        after = plan_job(Question(case.job, grown, case.measurements, "paper"))
        if before.objective is None:
            continue
        assert after.objective is not None, seed
        assert after.objective <= before.objective * (1 + 1e-9), seed
        assert before.estimate is not None
        pace = 1.05 / before.estimate.iteration_s
        tight = replace(
            case.job, objective=Objective(goal=case.job.objective.goal, min_iterations_per_s=pace)
        )
        answer = plan_job(Question(tight, case.cluster, case.measurements, "paper"))
        assert answer.objective is None or answer.objective >= before.objective * (1 - 1e-9), seed
