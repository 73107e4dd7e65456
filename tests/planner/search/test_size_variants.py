"""Micro batch sizes per pipeline are tried where they are allowed, and taken where they gain."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from planner.api import plan_job
from planner.pipelines.own_sizes import in_size, plan_with_own_sizes, rough_seconds_of
from planner.pipelines.pipeline_mix import PipelineMix, micro_batches_of, plan_of, seconds_of
from planner.problem.inventory import grants_of, lots_of
from planner.problem.objective import Limits
from planner.problem.question import OUTSIDE, Answer, Question
from planner.search.local_search import EventSearch
from planner.search.search_cache import SearchCache
from planner.search.size_variants import best_with_own_sizes
from simulator.api import estimator
from simulator.cluster.cluster import Cluster, Pool
from simulator.cluster.place_facts import PlaceFacts
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.plan_check import check_plan
from simulator.inputs.plan_file import plan_to_json, read_plan
from simulator.layer_costs.profile import Profile, Timing
from simulator.network.network import MeasuredNetwork
from simulator.spec.job import Job
from tests.planner.small_cases import Measured1
from tests.simulator.worlds import SEQUENCE, small_model

NAME = "micro-batch-per-pipeline"
SIZES = (1, 2, 4, 8)
WIDE, NARROW = "A100-40", "T4"
JOB = Job(
    "sizes", small_model(), global_batch=96, sequence=SEQUENCE, profile="sizes", precision="fp32",
    micro_batches=SIZES,
)  # fmt: skip
LAYERS = len(JOB.model.layers)


def timing(seconds: float) -> Timing:
    return Timing(np.full(LAYERS, seconds), np.full(LAYERS, 2 * seconds), 1e-4)


PROFILE = Profile(
    name="sizes",
    sequence=SEQUENCE,
    precision="fp32",
    layer_names=tuple(layer.name for layer in JOB.model.layers),
    timings={
        # One kind takes as long for eight samples as for one; the other is slower for each then.
        **{(WIDE, 1, size): timing(0.01) for size in SIZES},
        **{(NARROW, 1, size): timing(0.01 * size**2) for size in SIZES},
    },
    sizes={},
    optimizer_parameters={1: JOB.model.parameters},
    config={},
)
MEASURED = Measured1(network=MeasuredNetwork(), known=PROFILE)


def cluster(**gpus: int) -> Cluster:
    """GPUs by kind, in machines of four."""
    pools = (
        Pool("us-central1-a", gpu, f"{gpu}x4", 4, count, price_usd_per_gpu_hour=1.0,
             price_source="cluster file")
        for gpu, count in ((WIDE, gpus.get("wide", 0)), (NARROW, gpus.get("narrow", 0)))
        if count
    )  # fmt: skip
    return Cluster(tuple(pools), load_catalogue())


BOTH = cluster(wide=1, narrow=4)


@cache
def answer(here: Cluster = BOTH, *, allowed: bool = False, **options: object) -> Answer:
    objective = replace(JOB.objective, allow=(NAME,) if allowed else ())
    job = replace(JOB, objective=objective)
    asked = Question(job, here, MEASURED, budget=60, proves=False, is_bounded=False)
    return plan_job(replace(asked, **options))  # type: ignore[arg-type]  # by name


def test_sizes_of_their_own_are_taken_only_where_they_are_allowed() -> None:
    plain, own = answer(), answer(allowed=True)
    assert plain.plan is not None
    assert own.plan is not None
    assert len(plain.plan.sizes) == 1
    assert own.plan.sizes == (1, 8)
    for pipeline in own.plan.pipelines:
        kinds = {stage.place.gpu for stage in pipeline.stages}
        assert kinds == {WIDE if own.plan.size_of(pipeline) == 8 else NARROW}
    assert plain.objective is not None
    assert own.objective is not None
    assert own.objective < 0.85 * plain.objective
    assert own.space.endswith(OUTSIDE[NAME])
    assert not plain.space.endswith(OUTSIDE[NAME])
    assert any("micro batch 1/8" not in one.family for one in own.rejected)


def test_the_estimate_of_a_chosen_plan_is_that_of_its_file() -> None:
    own = answer(allowed=True)
    assert own.plan is not None
    assert own.estimate is not None
    plan = read_plan(plan_to_json(own.plan))
    assert plan == own.plan
    assert check_plan(plan, JOB, BOTH) == ()
    judge = estimator("event", job=JOB, cluster=BOTH, measurements=MEASURED)
    assert judge.estimate(plan).iteration_s == own.estimate.iteration_s


def test_simple_plans_take_own_sizes_that_gain_more_than_two_percent() -> None:
    own = answer(allowed=True, prefer="simple")
    assert own.plan is not None
    assert len(own.plan.sizes) == 2


@pytest.mark.parametrize("here", [cluster(wide=4), cluster(narrow=4)])
def test_one_kind_of_gpus_keeps_one_size(here: Cluster) -> None:
    plain, own = answer(here), answer(here, allowed=True)
    assert plain.plan is not None
    assert own.plan == plain.plan


def test_limit_that_only_sizes_of_their_own_keep_is_kept() -> None:
    plain, own = answer(), answer(allowed=True)
    assert plain.objective is not None
    assert own.objective is not None
    rate = 2 / (plain.objective + own.objective)
    objective = replace(JOB.objective, min_iterations_per_s=rate)
    asked = Question(
        replace(JOB, objective=objective), BOTH, MEASURED, budget=60, proves=False,
        is_bounded=False,
    )  # fmt: skip
    assert plan_job(asked).plan is None
    allowing = replace(asked.job, objective=replace(objective, allow=(NAME,)))
    found = plan_job(replace(asked, job=allowing))
    assert found.plan is not None
    assert found.plan.sizes == (1, 8)


# Mixes ---------------------------------------------------------------------------------------


def test_judged_variants_are_known_by_their_own_mixes() -> None:
    """Explanations use these mixes: a variant may have pipelines on GPUs that were idle."""
    search = replace(mixes()[0], budget=20)
    search.run()
    best_with_own_sizes(search)
    variants = [one for one in search.judged if len(one.plan.sizes) > 1]
    assert variants
    for one in variants:
        assert one.mix.pipelines == len(one.plan.pipelines)
        kinds = {search.lots[stage.lot].gpu for t in one.mix.templates for stage in t.stages}
        assert kinds == {stage.place.gpu for p in one.plan.pipelines for stage in p.stages}
        assert {template.micro_batch for template in one.mix.templates} == set(one.plan.sizes)


@cache
def mixes() -> tuple[EventSearch, list[PipelineMix]]:
    """Mixes of one size, and the search that drafted them."""
    lots = lots_of(BOTH, PlaceFacts(BOTH, MEASURED.network))
    question = Question(JOB, BOTH, MEASURED)
    judge, maker = SearchCache().event(question, lots, shares_tokens=False)
    limits = Limits(JOB.objective, None, None)
    search = EventSearch(JOB, lots, grants_of(BOTH, lots), maker, judge, limits, SIZES, (1,), 0)
    return search, list(dict.fromkeys(search.mixes()))


def test_a_mix_of_one_size_computes_the_batch_in_that_size() -> None:
    search, found = mixes()
    assert len(found) > 10
    for mix in found:
        size = mix.templates[0].micro_batch
        total = JOB.global_batch // size
        plan = plan_with_own_sizes(mix, JOB.global_batch, search.maker)
        if mix.pipelines > total:
            assert plan is None
            continue
        assert plan is not None
        assert plan.sizes == (size,)
        assert plan.samples_per_iteration == JOB.global_batch
        counts = [pipeline.micro_batches for pipeline in plan.pipelines]
        wanted = micro_batches_of(mix, total)
        assert max(abs(a - b) for a, b in zip(counts, wanted, strict=True)) <= 2
        stages = [pipeline.stages for pipeline in plan_of(mix, total, search.maker).pipelines]
        assert [pipeline.stages for pipeline in plan.pipelines] == stages


def test_rough_time_counts_parts_of_micro_batches() -> None:
    for mix in mixes()[1]:
        size = mix.templates[0].micro_batch
        whole = seconds_of(mix, JOB.global_batch // size)
        rough = rough_seconds_of(mix, JOB.global_batch)
        slowest = max(template.level_s for template in mix.templates)
        assert rough <= whole * (1 + 1e-9) <= rough + slowest + 1e-9 or rough == whole


def test_changed_sizes_compute_the_same_batch() -> None:
    search, found = mixes()
    mixed = [mix for mix in found if len(mix.templates) > 1 and mix.templates[0].micro_batch == 1]
    assert mixed
    for mix in mixed:
        changed = in_size(mix, 0, 4, JOB.global_batch, search.maker)
        assert changed is not None
        assert [t.micro_batch for t in changed.templates][:2] == [4, 1]
        plan = plan_with_own_sizes(changed, JOB.global_batch, search.maker)
        assert plan is not None
        assert plan.sizes == (1, 4)
        assert plan.samples_per_iteration == JOB.global_batch
