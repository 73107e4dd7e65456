"""The ZeRO stage as a choice: where it gains, where it does not, and what the answer says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from planner.api import plan_job
from planner.either_zero import better_zero
from planner.problem.question import EITHER_ZERO, STOPPED, Answer, Question
from planner.search.search_cache import SearchCache
from simulator.api import Measurements, estimator
from simulator.cluster.cluster import Cluster, Pool
from simulator.estimate.event_estimator import EventEstimator
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.plan_check import check_plan
from simulator.inputs.plan_file import plan_to_json, read_plan
from simulator.models.presets import preset
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Plan, Stage
from worker.layout.rank_layout import plan_problems

POOL = Pool("us-central1-a", "V100-16", "V100-16x8", 8, 8, price_usd_per_gpu_hour=2.0,
            price_source="cluster file")  # fmt: skip
CLUSTER = Cluster((POOL,), load_catalogue())
JOB = Job(
    "tight", preset("opt-1.3b"), global_batch=32, sequence=1024, precision="fp16", optimizer="adam",
    max_tp=1,
)  # fmt: skip
"""Its weights, gradients and moments are larger than one GPU; without most moments they are not."""
ASKED = Question(
    JOB, CLUSTER, Measurements(), budget=40, proves=False, is_bounded=False, tries=("zero1",)
)
SMALL = replace(ASKED, job=replace(JOB, model=preset("gpt2"), global_batch=64))


def judge_of(job: Job) -> EventEstimator:
    found = estimator("event", job=job, cluster=CLUSTER, measurements=Measurements())
    assert isinstance(found, EventEstimator)
    return found


def test_moments_are_shared_where_larger_micro_batches_fit_then() -> None:
    found, plain = plan_job(ASKED), plan_job(replace(ASKED, tries=()))
    assert found.plan is not None
    assert plain.plan is not None
    assert (found.plan.zero, plain.plan.zero) == (1, None)
    assert found.plan.micro_batch_size > plain.plan.micro_batch_size
    (gain,) = found.gains
    assert (gain.best, gain.without, gain.is_taken) == (found.objective, plain.objective, True)
    assert gain.best is not None
    assert gain.without is not None
    assert gain.best < 0.98 * gain.without
    assert "change it in the job" in str(gain)


def test_moments_of_a_job_that_shares_them_stay_whole_where_that_is_faster() -> None:
    """A small model fits anyway, and sending weights costs time."""
    job = replace(SMALL.job, zero=1)
    found = plan_job(replace(SMALL, job=job))
    assert found.plan is not None
    assert found.plan.zero == 0
    alone = plan_job(SMALL)
    assert alone.plan == replace(found.plan, zero=None)
    assert alone.gains[0].is_taken is False
    assert alone.objective == found.objective


@pytest.mark.parametrize("zero", [0, 1])
def test_the_estimate_is_that_of_the_plans_file(zero: int) -> None:
    job = replace(JOB, zero=zero)  # type: ignore[arg-type]  # 0 or 1
    found = plan_job(replace(ASKED, job=job))
    assert found.plan is not None
    assert found.estimate is not None
    plan = read_plan(plan_to_json(found.plan))
    assert plan == found.plan
    assert check_plan(plan, job, CLUSTER) == ()
    estimate = judge_of(job).estimate(plan)
    assert estimate.iteration_s == found.estimate.iteration_s
    assert estimate.memory == found.estimate.memory


def test_a_zero_stage_in_the_plan_equals_one_in_the_job() -> None:
    """Equal in memory, sums, broadcasts, optimizer steps, timelines and cures."""
    layers = len(SMALL.job.model.layers)
    stages = (Stage((0, 5), 1, (POOL.place,)), Stage((5, layers), 1, (POOL.place,)))
    plan = Plan(1, (Pipeline(8, stages), Pipeline(8, stages)))
    for zero in (0, 1):
        own = replace(plan, zero=zero)  # type: ignore[arg-type]  # 0 or 1
        there = judge_of(replace(SMALL.job, zero=zero))  # type: ignore[arg-type]  # 0 or 1
        for stage in (0, 1):
            here = judge_of(replace(SMALL.job, zero=stage))  # type: ignore[arg-type]  # 0 or 1
            assert here.estimate(own) == there.estimate(plan)
            assert here.bytes_between_zones(own) == there.bytes_between_zones(plan)
            assert here.details(own).optimizer_s == there.details(plan).optimizer_s
    assert there.estimate(plan).memory != judge_of(SMALL.job).estimate(plan).memory


def test_the_runtime_trains_with_the_stage_of_the_job() -> None:
    layers = len(JOB.model.layers)
    plan = Plan(1, (Pipeline(32, (Stage((0, layers), 1, (POOL.place,)),)),), zero=1)
    (problem,) = plan_problems(plan, JOB)
    said = "plan: zero: is 1, but the job trains with zero = 0; set training.zero = 1 in the job"
    assert str(problem).startswith(said)
    assert plan_problems(plan, replace(JOB, zero=1)) == ()


# Two answers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers() -> tuple[Answer, Answer]:
    """A worse answer with the job's stage, and a better one with the other."""
    plain = plan_job(replace(ASKED, tries=()))
    found = plan_job(replace(ASKED, tries=(), job=replace(JOB, zero=1)))
    return plain, found


def told(*each: Answer | type[KeyboardInterrupt]) -> Callable[[Question, SearchCache], Answer]:
    left = list(each)

    def ask(_question: Question, _cache: SearchCache) -> Answer:
        one = left.pop(0)
        if isinstance(one, Answer):
            return one
        raise one

    return ask


def test_the_bounds_are_those_of_both_spaces(answers: tuple[Answer, Answer]) -> None:
    plain, found = answers
    plain = replace(plain, lower_bound=0.3, lower_bound_s=0.2, covered="a")
    found = replace(found, lower_bound=0.1, lower_bound_s=0.4, covered="a")
    both = better_zero(ASKED, told(plain, found), SearchCache())
    assert (both.lower_bound, both.lower_bound_s) == (0.1, 0.2)
    assert both.space == f"a; {EITHER_ZERO}"
    assert both.plan is not None
    assert both.plan.zero == 1


def test_bounds_do_not_cover_a_space_without_a_plan(answers: tuple[Answer, Answer]) -> None:
    none = Answer(None, None, 5, 0.0, 0.0, "throughput")
    for pair, zero in (((answers[0], none), None), ((none, answers[1]), 1)):
        one = better_zero(ASKED, told(*pair), SearchCache())
        assert one.plan is not None
        assert one.plan.zero == zero
        assert EITHER_ZERO not in one.space
    assert better_zero(ASKED, told(none, none), SearchCache()).plan is None


def test_a_gap_that_one_of_them_misses_is_reported(answers: tuple[Answer, Answer]) -> None:
    asked = replace(ASKED, gap=0.05)
    plain, found = answers
    assert plain.objective is not None
    assert found.objective is not None
    found = replace(found, lower_bound=0.99 * found.objective)
    missed = replace(plain, lower_bound=0.5 * found.objective, note="missed")
    assert better_zero(asked, told(missed, found), SearchCache()).note == "missed"
    near = replace(missed, lower_bound=0.96 * found.objective)
    assert better_zero(asked, told(near, found), SearchCache()).note == ""


def test_an_interruption_keeps_what_was_found(answers: tuple[Answer, Answer]) -> None:
    plain, found = answers
    asked = replace(ASKED, is_stoppable=True)
    stopped = better_zero(asked, told(plain, KeyboardInterrupt), SearchCache())
    assert (stopped.plan, stopped.note) == (plain.plan, STOPPED)
    at_once = better_zero(asked, told(replace(plain, note=STOPPED)), SearchCache())
    assert at_once.plan == plain.plan
    last = better_zero(asked, told(plain, replace(found, note=STOPPED)), SearchCache())
    assert last.note == STOPPED
    with pytest.raises(KeyboardInterrupt):
        better_zero(ASKED, told(plain, KeyboardInterrupt), SearchCache())


def test_the_jobs_stage_is_simpler_where_the_two_are_tied(answers: tuple[Answer, Answer]) -> None:
    """The other one's plan is 1 % faster."""
    plain, _ = answers
    assert plain.estimate is not None
    seconds = 0.99 * plain.estimate.iteration_s
    faster = replace(plain, estimate=replace(plain.estimate, iteration_s=seconds))
    simple = better_zero(replace(ASKED, prefer="simple"), told(plain, faster), SearchCache())
    fastest = better_zero(ASKED, told(plain, faster), SearchCache())
    assert simple.plan is not None
    assert fastest.plan is not None
    assert (simple.plan.zero, fastest.plan.zero) == (None, 1)
