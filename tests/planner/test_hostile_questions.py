"""Questions that no sensible user asks: every one gets a plan, its reasons or one clear error."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest

from planner.api import plan_job
from planner.cost_frontier import frontier
from planner.problem.question import Answer, Question
from planner.what_if import explained
from simulator.cluster.cluster import Pool, Quota
from simulator.documents.problems import InputError
from simulator.inputs.plan_check import check_plan
from simulator.models.families import build_model
from simulator.spec.job import Job, Objective
from tests.planner.small_cases import GPUS, ZONES, SmallCase, random_case

EXTREMES = (1e-12, 1e-9, 1e-6, 1e-3, 0.1, 1.0, 1e3, 1e9, 1e12)
"""Values of limits; files accept any number above 0."""
NONSENSE = ("nan", "inf%", "0000000%")
"""Text that no sentence may contain."""
BUDGET = 12
"""Plans judged in one search, which keeps a question quick."""


def hostile_question(rng: random.Random) -> Question:
    """A small case with some of its parts pushed to their limits."""
    case = random_case(rng, gpus_max=rng.choice([1, 2, 6, 16]), batch=rng.choice([1, 4, 7, 12]))
    pools = tuple(_hostile_pool(rng, pool) for pool in case.cluster.pools)
    if rng.random() < 0.03:
        pools = (*pools, _thousands(rng))
    job = _hostile_job(rng, case)
    cluster = replace(case.cluster, pools=pools, quotas=_quotas(rng, pools))
    objective = _objective(rng, case)
    steps = rng.choice([None, 1, 10, 10**12])
    left = None
    if rng.random() < 0.3:
        objective, steps = replace(objective, deadline="2020-01-01T00:00:00Z"), steps or 1
        left = rng.choice([-1e12, -1.0, 0.0, 1e-9, 1.0, 1e12])
    return Question(
        replace(job, objective=objective, steps=steps),
        cluster,
        case.measurements,
        rng.choice(["event", "event", "paper"]),
        rng.choice(["full"] * 9 + ["paper"]),
        rng.choice([1, BUDGET]),
        left,
        rng.random() < 0.8,
    )


def _hostile_pool(rng: random.Random, pool: Pool) -> Pool:
    price = rng.choice([pool.price_usd_per_gpu_hour] * 4 + [0.0, 0.0, 1e-9, 1e9])
    price = None if rng.random() < 0.05 else price
    source = "unknown" if price is None else pool.price_source
    gpus = rng.choice([pool.gpus] * 4 + [0])
    return replace(
        pool,
        gpus=gpus,
        spot=rng.random() < 0.3,
        price_usd_per_gpu_hour=price,
        price_source=source,
    )


def _thousands(rng: random.Random) -> Pool:
    gpu, gpus = rng.choice(GPUS), rng.choice([2048, 4099])
    return Pool(
        rng.choice(ZONES), gpu, f"{gpu}x8", 8, gpus,
        price_usd_per_gpu_hour=rng.choice([0.0, 2.0]), price_source="cluster file",
    )  # fmt: skip


def _hostile_job(rng: random.Random, case: SmallCase) -> Job:
    job = replace(
        case.job,
        max_tp=rng.choice([1, 2, 4, 4, 8, 3]),
        recompute=rng.choice(["none", "none", "full", "auto"]),
        zero=rng.choice([0, 0, 1]),
        micro_batches=rng.choice([None, None, (1,), (case.job.global_batch,), (3,)]),
        gradient_sync=rng.choice(["overlap", "serial"]),
    )
    if rng.random() < 0.1:
        job = replace(job, profile=None)
    if rng.random() < 0.1:
        vast = build_model(
            "gpt2", layers=rng.choice([1, 4]), hidden=2**16, heads=64, vocab=10**6, sequence=64
        )
        job = replace(job, model=vast, profile=None)
    return job


def _quotas(rng: random.Random, pools: tuple[Pool, ...]) -> tuple[Quota, ...]:
    if rng.random() < 0.6:
        return ()
    return tuple(
        Quota(pool.zone, pool.gpu, rng.choice([0, 0, 1, 3])) for pool in pools if rng.random() < 0.7
    )


def _objective(rng: random.Random, case: SmallCase) -> Objective:
    """Limits at random; half of them near what the case's own best plan takes."""

    def limit(near: float) -> float | None:
        pick = rng.random()
        if pick < 0.75:
            return None
        if pick < 0.9 and near > 0:
            return near * rng.choice([0.5, 0.999, 1.0, 1.001, 2.0])
        return rng.choice(EXTREMES)

    seconds, usd = _find_known(case) if rng.random() < 0.5 else (1.0, 1.0)
    return Objective(
        goal=rng.choice(["throughput", "cost"]),
        max_usd_per_iteration=limit(usd),
        max_usd_per_hour=limit(usd / seconds * 3600),
        max_usd_total=limit(usd * 10),
        min_iterations_per_s=limit(1 / seconds),
        max_spot_share=rng.choice([None, None, 0.0, 0.5, 1.0]),
    )


def _find_known(case: SmallCase) -> tuple[float, float]:
    try:
        found = plan_job(Question(case.job, case.cluster, case.measurements, budget=1))
    except InputError:
        return 1.0, 1.0
    if found.estimate is None:
        return 1.0, 1.0
    return found.estimate.iteration_s, found.estimate.money.total_usd or 1.0


def answer_to(question: Question) -> Answer | None:
    """The answer; ``None`` for a question that is refused with a clear error."""
    try:
        return plan_job(question)
    except InputError as error:
        refused = error.problems
    assert refused
    assert all(problem.place and problem.what and problem.cure for problem in refused)
    return None


def check(question: Question, answer: Answer) -> None:
    """What must hold of every answer."""
    if answer.plan is None:
        said = " ".join(map(str, answer.problems))
        assert said
        assert not any(bad in said for bad in NONSENSE)
        return
    job = question.job
    if not answer.batch_exact:
        job = replace(job, global_batch=answer.plan.samples_per_iteration)
    assert not check_plan(answer.plan, job, question.cluster)
    assert answer.estimate is not None
    assert answer.estimate.fits
    assert answer.objective is not None
    assert 0 <= answer.lower_bound <= answer.objective * (1 + 1e-9)
    assert answer.to_json(seconds=0.0)["plan"]
    assert not any(bad in " ".join(answer.explain) for bad in NONSENSE)


@pytest.mark.parametrize("estimator", ["event", "paper"])
def test_free_gpus_cost_nothing_and_have_reasons(estimator: str) -> None:
    case = random_case(random.Random("free"), gpus_max=4, layers_max=3, goal="cost")
    free = tuple(replace(pool, price_usd_per_gpu_hour=0.0) for pool in case.cluster.pools)
    question = Question(
        case.job, replace(case.cluster, pools=free), case.measurements, estimator, budget=BUDGET
    )
    answer = plan_job(question)
    check(question, answer)
    assert answer.objective == 0.0
    why = explained(question, answer)
    assert why.explain
    # Nothing costs less than nothing, so no plan with another machine is a gain.
    assert {one.why_none for one in why.why.one_more} == {"no gain found"}


def test_of_plans_that_cost_nothing_the_fastest_is_looked_for() -> None:
    case = random_case(random.Random("free 10"), gpus_max=12, layers_max=6, batch=12)
    free = tuple(replace(pool, price_usd_per_gpu_hour=0.0) for pool in case.cluster.pools)
    asked = Question(
        case.job,
        replace(case.cluster, pools=free),
        case.measurements,
        budget=BUDGET,
        proves=False,
        is_bounded=False,
    )
    seconds = []
    for goal in ("throughput", "cost"):
        answer = plan_job(replace(asked, job=replace(case.job, objective=Objective(goal=goal))))
        assert answer.estimate is not None
        seconds.append(answer.estimate.iteration_s)
    assert seconds[0] == pytest.approx(seconds[1])


@pytest.mark.parametrize("estimator", ["event", "paper"])
@pytest.mark.parametrize("most", EXTREMES)
def test_any_limit_in_dollars_is_kept_or_the_answer_names_it(estimator: str, most: float) -> None:
    case = random_case(random.Random("budget"), gpus_max=3, layers_max=3)
    objective = Objective(max_usd_per_iteration=most, max_usd_per_hour=most)
    question = Question(
        replace(case.job, objective=objective),
        case.cluster,
        case.measurements,
        estimator,
        budget=BUDGET,
    )
    check(question, plan_job(question))


def test_the_paper_estimator_refuses_recomputation() -> None:
    case = random_case(random.Random("full"), gpus_max=3, layers_max=3)
    job = replace(case.job, recompute="full")
    with pytest.raises(InputError, match="knows no recomputation"):
        plan_job(Question(job, case.cluster, case.measurements, "paper"))


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.filterwarnings("error")
def test_a_hostile_question_gets_a_plan_or_a_clear_error(examples: int) -> None:
    for seed in range(2 * examples):
        rng = random.Random(f"hostile {seed}")
        question = hostile_question(rng)
        try:
            answer = answer_to(question)
            if answer is None:
                continue
            check(question, answer)
            if answer.plan is not None and rng.random() < 0.1:
                explained(question, answer)
            if rng.random() < 0.02:
                _frontier(question)
        except Exception as error:
            error.add_note(f"seed {seed}: {question}")
            raise


def _frontier(question: Question) -> None:
    with contextlib.suppress(InputError):
        frontier(question, points=3)
