"""Equal pipelines from the dynamic program over layers, against all chains of stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.api import plan_job
from planner.pipelines.pipeline_mix import plan_of
from planner.pipelines.pipeline_template import Template, TemplateMaker
from planner.pipelines.stage_memory import TemplateStage
from planner.problem.inventory import is_supplied, lots_of
from planner.problem.objective import Limits
from planner.problem.question import Question
from planner.search import drafts
from planner.search.drafts import EventDrafts
from planner.search.equal_pipelines import (
    EqualPipelines,
    EqualPipelineSearch,
    boundaries,
    equal_mixes,
    least_time,
    quickest_first,
    spread,
    stage_seconds,
)
from planner.search.search_cache import SearchCache
from simulator.api import Measurements
from simulator.arrays import Floats
from simulator.cluster.cluster import Cluster, Pool
from simulator.cluster.place_facts import PlaceFacts
from simulator.hardware.catalogue import load_catalogue
from simulator.models.presets import preset
from simulator.spec.job import Job, Objective

LAYERS = 6


def pool(zone: str, machines: int, gpu: str = "A100-40", size: int = 4) -> Pool:
    return Pool(
        zone, gpu, f"{gpu}x{size}", size, machines * size,
        price_usd_per_gpu_hour=2.9, price_source="cluster file",
    )  # fmt: skip


def question(*pools: Pool, model: str = "gpt2-large", **changed: Any) -> Question:
    job = Job(
        "j", preset(model), 64, 1024, precision="fp16", optimizer="adam", max_tp=2
    )  # fmt: skip
    cluster = Cluster(pools, load_catalogue())
    return Question(replace(job, **changed), cluster, Measurements(), is_bounded=False)


def drafts_of(asked: Question) -> EventDrafts:
    lots = lots_of(asked.cluster, PlaceFacts(asked.cluster, asked.measurements.network))
    judge, maker = SearchCache().event(asked, lots)
    return EventDrafts(
        asked.job, lots, (), maker, judge, Limits(asked.job.objective), (1, 2, 4), (1, 2)
    )


def every_chain(choices: int, layers: int) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """All chains of stages, as (choice, start, end)."""
    for count in range(1, layers + 1):
        for inner in itertools.combinations(range(1, layers), count - 1):
            ends = (*inner, layers)
            for some in itertools.product(range(choices), repeat=count):
                yield tuple(zip(some, (0, *inner), ends, strict=True))


def slowest_s(seconds: Floats, chain: tuple[tuple[int, int, int], ...]) -> float:
    """The time of the slowest stage of a chain."""
    behind = range(len(chain) - 1, -1, -1)
    return max(float(seconds[k, *stage]) for k, stage in zip(behind, chain, strict=True))


def test_the_least_time_is_that_of_all_chains() -> None:
    """Times that rise with the layers of a stage and with the stages behind it."""
    draws = np.random.default_rng(0)
    prices = np.array([1.0, 2.0])
    for _ in range(40):
        work = draws.uniform(0.5, 2.0, LAYERS).cumsum()
        work = np.concatenate([[0.0], work])
        seconds = np.full((LAYERS, 2, LAYERS, LAYERS + 1), np.inf)
        for choice, speed in enumerate((1.0, draws.uniform(1.0, 2.0))):
            for start, end in itertools.combinations(range(LAYERS + 1), 2):
                spent = (work[end] - work[start]) / speed
                seconds[:, choice, start, end] = spent + draws.uniform(0, 0.1)
                seconds[:, choice, start, end] += 0.05 * np.arange(LAYERS)
        # Rising with the end, as the times of stages are.
        seconds = np.maximum.accumulate(np.where(np.isinf(seconds), 0.0, seconds), axis=3)
        seconds[:, :, np.arange(LAYERS)[:, None] >= np.arange(LAYERS + 1)] = np.inf
        budget = float(draws.integers(1, 9))

        best = min(
            slowest_s(seconds, chain)
            for chain in every_chain(2, LAYERS)
            if sum(prices[choice] for choice, _, _ in chain) <= budget
        )
        found = least_time(seconds, prices, budget, best / 3, best * 4)
        assert found is not None
        time_s, stages = found
        assert best * (1 - 1e-9) <= time_s <= best * 1.05
        assert slowest_s(seconds, stages) <= time_s
        assert sum(prices[choice] for choice, _, _ in stages) <= budget
        assert least_time(seconds, prices, budget, best / 3, best * 0.99) is None


@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_a_stage_takes_as_long_as_in_the_tables(recompute: str) -> None:
    """By itself, as the search of all small plans bounds it."""
    some = drafts_of(question(pool("us-central1-a", 4), model="opt-1.3b", recompute=recompute))
    tables, layers, count, pipelines = some.tables, some.maker.costs.layer_count, 7, 2
    at = boundaries(layers, 3)
    found = stage_seconds(tables, 2, count, pipelines, stages_max=5, at=at)
    start, end = np.triu_indices(len(at), 1)
    for behind, choice in itertools.product(range(5), range(len(tables.choices))):
        alone = tables.stage_s(
            2, count, pipelines, behind=behind, where=(choice, at[start], at[end])
        )[:, -1]
        np.testing.assert_allclose(found[behind, choice, start, end], alone)


@pytest.mark.parametrize("layers", [1, 2, 3, 12, 40])
def test_every_layer_may_begin_a_stage(layers: int) -> None:
    assert boundaries(layers, 1).tolist() == list(range(layers + 1))


def test_every_second_layer_may_begin_a_stage_and_the_outer_ones() -> None:
    assert boundaries(11, 2).tolist() == [0, 1, 3, 5, 7, 9, 10, 11]
    assert boundaries(12, 2).tolist() == [0, 1, 3, 5, 7, 9, 11, 12]


def test_there_are_more_stages_than_drafts_have() -> None:
    some = drafts_of(question(pool("us-central1-a", 16)))
    depths = {len(mix.templates[0].stages) for mix in equal_mixes(some, None, 24)}
    assert max(depths) > drafts.STAGES_MAX


def test_inner_stages_may_be_alike() -> None:
    some = drafts_of(question(pool("us-central1-a", 16)))
    search = EqualPipelineSearch(some.maker, some.tables, 0, 64, None)
    found = search.best((1,), 64, 16)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    inner = [{stage.tp for stage in one.template.stages[1:-1]} for one in found]
    assert {1} in inner
    assert {2} in inner


def test_each_kind_has_its_own_memory() -> None:
    """The first lot has A100s of 80 GB; what is found for T4s fits on T4s."""
    some = drafts_of(
        question(
            pool("us-central1-a", 1, "A100-80"), pool("us-central1-a", 32, "T4"),
            model="opt-6.7b", precision="fp32",
        )
    )  # fmt: skip
    found = [
        mix
        for mix in equal_mixes(some, None, 24)
        if {some.lots[lot].gpu for lot in mix.groups()} == {"T4"}
    ]
    assert found
    for mix in found:
        plan = plan_of(mix, 64 // mix.templates[0].micro_batch, some.maker)
        assert some.judge.estimate(plan).fits, mix


def test_more_pipelines_of_a_template_are_another_result() -> None:
    some = drafts_of(question(pool("us-central1-a", 16)))
    template = made(some.maker, (1, 1))
    many, few, slow = (
        EqualPipelines(seconds, pipelines, template)
        for seconds, pipelines in ((2.0, 16), (1.0, 8), (3.0, 8))
    )
    assert quickest_first([many, few, slow]) == [few, many]


def test_pipelines_are_spread_over_zones() -> None:
    """Five GPUs and seven, for pipelines of two stages: one of them is in both zones."""
    pools = pool("us-central1-a", 5, size=1), pool("us-central1-b", 7, size=1)
    some = drafts_of(question(*pools, model="opt-350m"))
    template = made(some.maker, (1, 1))
    whole, across = spread(some, template, 6, (1, 0))
    zones = [[some.lots[stage.lot].zone[-1] for stage in t.stages] for t in whole.templates]
    assert (zones, whole.counts) == ([["b", "b"], ["a", "a"], ["b", "a"]], (3, 2, 1))
    # All across: as many as the smaller zone has room for, in the same stages.
    assert [[some.lots[s.lot].zone[-1] for s in t.stages] for t in across.templates] == [["b", "a"]]
    assert across.counts == (5,)
    for mix in (whole, across):
        assert is_supplied(plan_of(mix, 64, some.maker), some.lots)


def test_there_are_no_more_pipelines_than_micro_batches() -> None:
    some = drafts_of(question(pool("us-central1-a", 16), global_batch=8))
    (mix,) = spread(some, made(some.maker, (1, 1), micro_batch=4), 9, (0,))
    assert mix.counts == (2,)


@pytest.mark.slow
def test_deep_pipelines_are_found_where_they_are_quicker() -> None:
    """The best plan whose pipelines have at most twelve stages takes 1.43 s."""
    asked = question(pool("us-central1-c", 75, "L4"), global_batch=256, precision="fp32", max_tp=4)
    answer = plan_job(asked)
    assert answer.estimate is not None
    assert answer.estimate.iteration_s < 1.1


@pytest.mark.slow
def test_deep_pipelines_are_found_within_a_limit_in_dollars() -> None:
    """Of 82 GPUs the limit pays for some fifty, as three pipelines of 18 stages."""
    asked = question(
        pool("europe-west4-a", 82, size=1), model="opt-6.7b", global_batch=256, sequence=2048,
        max_tp=8, recompute="auto", objective=Objective(max_usd_per_iteration=0.27),
    )  # fmt: skip
    answer = plan_job(replace(asked, prefer="fastest"))
    assert answer.estimate is not None
    assert answer.estimate.iteration_s < 6.1


def made(maker: TemplateMaker, degrees: tuple[int, ...], micro_batch: int = 1) -> Template:
    found = maker.template(tuple(TemplateStage(0, tp, "none") for tp in degrees), micro_batch, 64)
    assert found is not None
    return found
