"""Outer steps as a choice: where they gain, where they are not taken, and what the answer says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from planner import event_planner
from planner.api import plan_job
from planner.outer_answer import better_with_outer_steps
from planner.problem.question import OUTER_OR_NOT, OUTSIDE, STOPPED, Answer, Question
from planner.search.search_cache import SearchCache
from simulator.api import Measurements, estimator
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.plan_check import check_plan
from simulator.inputs.plan_file import plan_to_json, read_plan
from simulator.models.presets import preset
from simulator.spec.job import Job
from worker.layout.rank_layout import plan_problems

NEAR, BESIDE, FAR = "us-central1-a", "us-central1-b", "europe-west4-a"


def pool(zone: str) -> Pool:
    return Pool(zone, "V100-16", "V100-16x4", 4, 4, price_usd_per_gpu_hour=2.0,
                price_source="cluster file")  # fmt: skip


def cluster(*zones: str) -> Cluster:
    return Cluster(tuple(map(pool, zones)), load_catalogue())


JOB = Job(
    "far", preset("gpt2"), global_batch=64, sequence=1024, precision="fp16", optimizer="adam",
    max_tp=1,
)  # fmt: skip
ASKED = Question(
    JOB, cluster(NEAR, FAR), Measurements(), budget=12, proves=False, tries=("outer-steps",),
    outer_every=50,
)  # fmt: skip
"""Summing the gradients between the two zones takes longer than all passes."""


def test_outer_steps_are_taken_where_sums_across_zones_dominate() -> None:
    found, plain = plan_job(ASKED), plan_job(replace(ASKED, tries=(), outer_every=None))
    assert found.plan is not None
    assert found.estimate is not None
    assert plain.plan is not None
    assert (found.plan.outer_every, plain.plan.outer_every) == (50, None)
    assert [len(group) for group in found.plan.outer_groups] == [4, 4]
    (gain,) = found.gains
    assert (gain.best, gain.without, gain.is_taken) == (found.objective, plain.objective, True)
    assert gain.best is not None
    assert gain.without is not None
    assert gain.best < 0.9 * gain.without
    assert "no runtime takes outer steps yet; the loss would differ" in str(gain)
    # Bytes between zones fall with the outer steps.
    plan = read_plan(plan_to_json(found.plan))
    assert plan == found.plan
    assert check_plan(plan, JOB, ASKED.cluster) == ()
    judge = estimator("event", job=JOB, cluster=ASKED.cluster, measurements=Measurements())
    estimate = judge.estimate(plan)
    assert estimate.iteration_s == found.estimate.iteration_s
    usual = judge.estimate(replace(plan, outer_every=None))
    assert estimate.money.egress_usd < usual.money.egress_usd / 20
    assert any("no runtime takes outer steps yet" in str(one) for one in plan_problems(plan, JOB))
    # The bound covers both.
    assert found.space.endswith(OUTER_OR_NOT)
    assert found.objective is not None
    assert 0 < found.lower_bound <= found.objective
    assert found.lower_bound_s <= plain.lower_bound_s


def test_in_one_zone_there_are_no_outer_steps() -> None:
    one = replace(ASKED, cluster=cluster(NEAR), is_bounded=False)
    found, plain = plan_job(one), plan_job(replace(one, tries=(), outer_every=None))
    assert found.plan == plain.plan
    assert str(found.gains[0]) == "outer-steps: all GPUs are in one zone"
    assert OUTER_OR_NOT not in found.space


def test_outer_steps_within_the_error_bar_are_not_taken() -> None:
    """In neighbouring zones with much to compute, sums are short and begin during the passes."""
    job = replace(JOB, global_batch=8192)
    asked = replace(ASKED, job=job, cluster=cluster(NEAR, BESIDE), is_bounded=False)
    found = plan_job(replace(asked, prefer="simple"))
    assert found.plan is not None
    assert found.plan.outer_every is None
    (gain,) = found.gains
    assert gain.best is not None
    assert gain.without is not None
    assert abs(gain.best / gain.without - 1) < 0.02
    assert not gain.is_taken


def test_a_limit_that_only_outer_steps_keep_is_kept() -> None:
    limit = replace(JOB.objective, min_iterations_per_s=4.2)
    asked = replace(ASKED, job=replace(JOB, objective=limit), is_bounded=False)
    found = plan_job(asked)
    assert found.plan is not None
    assert found.plan.outer_every == 50
    assert found.gains[0].without is None
    assert plan_job(replace(asked, tries=(), outer_every=None)).plan is None


def test_a_search_on_fewer_spot_gpus_starts_from_plans_that_fit_them() -> None:
    near, far = ASKED.cluster.pools
    spot = replace(ASKED.cluster, pools=(near, replace(far, spot=True)))
    limit = replace(JOB.objective, max_spot_share=0.5)
    asked = replace(ASKED, job=replace(JOB, objective=limit), cluster=spot, is_bounded=False)
    found = plan_job(asked)
    assert found.plan is not None
    assert found.plan.outer_every == 50


def test_an_interrupted_question_has_the_plan_without_outer_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered, calls = event_planner._answer, []

    def interrupted(question: Question, *rest: object) -> object:
        calls.append(question.outer_every)
        if question.outer_every is not None:
            raise KeyboardInterrupt
        return answered(question, *rest)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(event_planner, "_answer", interrupted)
    asked = replace(ASKED, is_bounded=False, is_stoppable=True)
    found = plan_job(asked)
    assert found.plan is not None
    assert (found.note, calls) == (STOPPED, [None, 50])
    with pytest.raises(KeyboardInterrupt):
        plan_job(replace(asked, is_stoppable=False))


# Two answers --------------------------------------------------------------------------------


@cache
def answers() -> tuple[Answer, Answer]:
    """Without outer steps in one zone, and with them in two."""
    alone = replace(ASKED, tries=(), outer_every=None, cluster=cluster(NEAR), is_bounded=False)
    return plan_job(alone), plan_job(replace(ASKED, is_bounded=False))


def told(*each: Answer) -> Callable[[Question, SearchCache], Answer]:
    left = list(each)
    return lambda _question, _cache: left.pop(0)


def test_a_plan_without_outer_steps_that_only_the_second_question_finds_is_taken() -> None:
    alone, _ = answers()
    assert alone.plan is not None
    assert alone.objective is not None
    assert alone.estimate is not None
    none = Answer(None, None, 5, 0.0, 0.0, "throughput")
    found = better_with_outer_steps(ASKED, told(none, alone), SearchCache())
    assert found.plan == alone.plan
    assert found.evaluations == 5 + alone.evaluations
    assert (found.gains[-1].without, found.gains[-1].is_taken) == (alone.objective, False)
    slower = replace(
        alone,
        plan=replace(alone.plan, together=1),
        estimate=replace(alone.estimate, iteration_s=2 * alone.objective),
    )
    for prefer in ("fastest", "simple"):
        asked = replace(ASKED, prefer=prefer)
        for pair in ((slower, alone), (alone, slower)):
            assert better_with_outer_steps(asked, told(*pair), SearchCache()).plan == alone.plan


def test_a_plan_with_outer_steps_of_another_cache_is_reported() -> None:
    """Plans with the other ZeRO stage are judged with a cache of their own."""
    alone, steps = answers()
    found = better_with_outer_steps(ASKED, told(alone, steps), SearchCache())
    gain = found.gains[-1]
    assert (gain.best, gain.without, gain.is_taken) == (steps.objective, alone.objective, True)


def test_a_plan_outside_of_the_searched_space_says_so() -> None:
    alone, steps = answers()
    assert alone.plan is not None
    assert alone.estimate is not None
    chunks = replace(alone.plan, schedule="interleaved", virtual_stages=2)
    fast = replace(alone, plan=chunks, estimate=replace(alone.estimate, iteration_s=1e-6))
    found = better_with_outer_steps(ASKED, told(fast, steps), SearchCache())
    assert found.plan == chunks
    assert found.space == f"{steps.covered}; {OUTSIDE['interleaved']}"
    found = better_with_outer_steps(ASKED, told(alone, steps), SearchCache())
    assert found.space == steps.covered


def test_the_search_with_outer_steps_starts_from_no_plan_with_sequence_parallelism() -> None:
    alone, steps = answers()
    assert steps.plan is not None
    assert steps.estimate is not None
    usual = replace(steps.plan, outer_every=None)
    cache, left, given = SearchCache(), [alone, steps], []
    for shares in (False, True):
        cache.judged.append((replace(usual, sequence_parallel=shares), steps.estimate))

    def ask(_question: Question, known: SearchCache) -> Answer:
        given.append(known.given)
        return left.pop(0)

    better_with_outer_steps(ASKED, ask, cache)
    assert given == [(), (usual,)]
