"""The master problem against exhaustive search, and mixes that only it finds."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.api import plan_job
from planner.pipelines.pipeline_mix import PipelineMix
from planner.pipelines.pipeline_template import Template
from planner.pipelines.stage_memory import TemplateStage
from planner.problem.inventory import grants_of, lots_of
from planner.problem.objective import Limits
from planner.problem.question import Question
from planner.search.local_search import EventSearch
from planner.search.packing import best_packing
from planner.search.search_cache import SearchCache
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool, Quota
from simulator.cluster.place_facts import PlaceFacts
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from simulator.models.families import build_model
from simulator.models.presets import preset
from simulator.spec.job import Job, Objective

SIZES = st.integers(0, 4)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[list[int]], list[int]]:
    """Values of things, what each uses of each resource (something of at least one), and rooms."""
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    uses = draw(
        st.lists(
            st.lists(SIZES, min_size=rows, max_size=rows).filter(any),
            min_size=columns,
            max_size=columns,
        )
    )
    values = draw(st.lists(SIZES, min_size=columns, max_size=columns))
    return values, uses, draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))


def best_vertex(values: list[int], uses: list[list[int]], room: list[int]) -> float:
    """The best value over all vertices, each found by solving its equations."""
    rows, columns = len(room), len(values)
    table = np.hstack([np.array(uses, dtype=float).T, np.eye(rows)])
    best = 0.0
    for basis in itertools.combinations(range(columns + rows), rows):
        square = table[:, basis]
        if abs(np.linalg.det(square)) < 1e-9:
            continue
        found = np.linalg.solve(square, room)
        if (found >= -1e-9).all():
            worth = [values[b] if b < columns else 0.0 for b in basis]
            best = max(best, float(found @ worth))
    return best


@given(problems())
def test_a_packing_is_the_best_vertex(
    problem: tuple[list[int], list[list[int]], list[int]],
) -> None:
    values, uses, room = problem
    found = best_packing(np.array(values, float), np.array(uses, float).T, np.array(room, float))
    assert (found >= 0).all()
    assert (np.array(uses, float).T @ found <= np.array(room) + 1e-6).all()
    assert float(found @ values) == pytest.approx(best_vertex(values, uses, room), abs=1e-6)


def search_in_two_zones(*quotas: Quota) -> EventSearch:
    """32 A100 and 32 V100 in each of two zones."""
    zones, kinds = ("us-central1-a", "us-central1-b"), ("A100-40", "V100-16")
    return search_on(list(itertools.product(zones, kinds)), *quotas)


def search_on(places: list[tuple[str, str]], *quotas: Quota) -> EventSearch:
    """32 GPUs of a kind in each zone named with it, in machines of four."""
    pools = tuple(Pool(zone, gpu, f"{gpu}x4", 4, 32) for zone, gpu in places)
    cluster = Cluster(pools, load_catalogue(), quotas=quotas)
    job = Job("two zones", preset("opt-350m"), 1024, 2048, precision="fp32", max_tp=4)
    question = Question(job, cluster, Measurements())
    lots = lots_of(cluster, PlaceFacts(cluster, question.measurements.network))
    judge, maker = SearchCache().event(question, lots)
    grants = grants_of(cluster, lots)
    return EventSearch(job, lots, grants, maker, judge, Limits(Objective()), (4,), (1, 2, 4), 100)


def lots_of_template(template: Template) -> set[int]:
    return {stage.lot for stage in template.stages}


def test_drafts_have_pipelines_over_two_kinds_in_each_zone_at_once() -> None:
    search = search_in_two_zones()
    zone = {n: lot.zone for n, lot in enumerate(search.lots)}
    found = [
        mix
        for mix in search.mixes()
        if len(mix.templates) == 2
        and all(len(lots_of_template(t)) == 2 for t in mix.templates)
        and all(len({zone[n] for n in lots_of_template(t)}) == 1 for t in mix.templates)
    ]
    assert found


def test_drafts_take_as_many_gpus_as_quotas_allow() -> None:
    """Most of what fits the machines would break a quota of few of them."""
    search = search_in_two_zones(
        Quota("us-central1", "A100-40", 24), Quota("us-central1-b", "V100-16", 0)
    )
    kinds = [(lot.gpu, lot.zone) for lot in search.lots]
    most = 0
    for mix in search.mixes():
        used = Counter[tuple[str, str]]()
        for lot, groups in mix.groups().items():
            used[kinds[lot]] += sum(tp * count for tp, count in groups.items())
        a100 = sum(count for (gpu, _), count in used.items() if gpu == "A100-40")
        assert a100 <= 24
        assert not used["V100-16", "us-central1-b"]
        most = max(most, used["V100-16", "us-central1-a"] + a100)
    assert most == 32 + 24


def test_layers_are_summed_over_the_gpus_that_hold_them() -> None:
    """The first stage takes longest, whatever groups sum the second one."""
    search = search_in_two_zones()
    a100, v100 = (
        next(n for n, lot in enumerate(search.lots) if lot.gpu == gpu)
        for gpu in ("A100-40", "V100-16")
    )

    def sums_s(tp: int) -> float:
        stages = (TemplateStage(v100, 1, "none"), TemplateStage(a100, tp, "none"))
        template = search.maker.timed(stages, 4, (0, 16, 26))
        return search.sums.seconds(PipelineMix((template,), (8,)))

    assert 0 < sums_s(4) == sums_s(1)


def test_a_model_of_too_many_layers_to_search_is_refused() -> None:
    deep = Job("deep", build_model("gpt2", layers=10_000, hidden=8, heads=4), 8, 8, max_tp=4)
    cluster = Cluster((Pool("us-central1-a", "T4", "T4x4", 4, 4),), load_catalogue())
    with pytest.raises(InputError, match="has 10,002 layers, too many to search with 3 GPU kinds"):
        plan_job(Question(deep, cluster, Measurements()))


def test_sets_of_many_kinds_are_few() -> None:
    kinds = ("A100-40", "A100-80", "V100-16", "T4", "L4", "H100-80", "RTX-3090", "RTX-2080")
    search = search_on([("us-central1-a", kind) for kind in kinds])
    sets = search.lot_sets()
    assert {len(chosen) for chosen in sets} == {1, 2, 7, 8}
    assert len(sets) == 8 + 28 + 8 + 1
