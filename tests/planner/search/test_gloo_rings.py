"""Gloo's rings follow the order of the ranks: what bounds may assume of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from planner.api import plan_job
from planner.pipelines.pipeline_template import TemplateMaker
from planner.problem.inventory import lots_of
from planner.problem.question import Question
from planner.search.stage_limits import StageTimeTables
from simulator.api import Measurements, estimator
from simulator.cluster.cluster import Cluster, Pool
from simulator.estimate.event_estimator import EventEstimator
from simulator.hardware.catalogue import load_catalogue
from simulator.models.families import build_model
from simulator.network.curves import Curve
from simulator.network.network import MeasuredNetwork
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Plan, Stage

ZONES = ("us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f")
SIZES = (1e3, 1e9)


def wire(rate: float, flows: int = 1) -> Curve:
    return Curve(flows, SIZES, (1e-4, 1e-4 + SIZES[1] / rate))


def pool(zone: str, each: int, gpus: int) -> Pool:
    return Pool(
        zone, "cpu", f"cpux{each}", each, gpus,
        price_usd_per_gpu_hour=1.0, price_source="cluster file",
    )  # fmt: skip


def judge_of(question: Question) -> EventEstimator:
    found = estimator(
        "event",
        job=question.job,
        cluster=question.cluster,
        measurements=question.measurements,
    )
    assert isinstance(found, EventEstimator)
    return found


@pytest.mark.parametrize("batch", [8, 32])
def test_no_order_of_the_pipelines_is_below_the_bound(batch: int) -> None:
    """Two links of six are slow, and a ring over four nodes may pass by both."""
    model = build_model("gpt2", layers=1, hidden=512, heads=4, vocab=256, sequence=128)
    slow = {frozenset(ZONES[:2]), frozenset(ZONES[2:])}
    links = {
        ((a, "cpu"), (b, "cpu")): {1: wire(5e7 if {a, b} in slow else 1e9)}
        for a, b in itertools.permutations(ZONES, 2)
    }
    sizes = (1, 2, 4, 8)
    job = Job("rings", model, batch, 128, precision="fp32", max_tp=1, micro_batches=sizes)
    pools = tuple(pool(zone, 1, 1) for zone in ZONES)
    measured = Measurements(network=MeasuredNetwork(between=links))
    question = Question(job, Cluster(pools, load_catalogue()), measurements=measured)
    answer, judge, layers = plan_job(question), judge_of(question), len(model.layers)
    found = []
    for order in itertools.permutations(pools):
        for size in sizes:
            if batch % (4 * size) == 0:
                count = batch // 4 // size
                stages = [(Stage((0, layers), 1, (one.place,)),) for one in order]
                plan = Plan(size, tuple(Pipeline(count, each) for each in stages))
                found.append(judge.estimate(plan).iteration_s)
    assert answer.lower_bound is not None
    assert answer.lower_bound <= min(found)


def test_a_narrow_group_may_stand_between_wide_ones() -> None:
    """Then each hop between machines carries two flows, also that from and to a narrow group."""
    model = build_model("gpt2", layers=2, hidden=512, heads=8, vocab=512, sequence=128)
    here = ZONES[0], "cpu"
    links = {(here, here): {flows: wire(5e7, flows) for flows in (1, 2)}}
    job = Job("narrow", model, 24, 128, precision="fp32", max_tp=2, micro_batches=(1,))
    one = pool(ZONES[0], 8, 16)
    measured = Measurements(network=MeasuredNetwork(between=links))
    question = Question(job, Cluster((one,), load_catalogue()), measurements=measured)
    judge, layers = judge_of(question), len(model.layers)
    plan = Plan(
        1,
        tuple(
            Pipeline(2, (Stage((0, layers), tp, (replace(one.place, node=node),)),))
            for node in "ab"
            for tp in (2, 1, 1, 1, 1, 2)
        ),
    )
    lots = lots_of(question.cluster, judge.facts)
    tables = StageTimeTables(
        TemplateMaker(judge.costs, judge.network, judge.facts, lots),
        lots,
        degrees=(1, 2),
        recompute="none",
        per_layer_sync=judge.overlaps,
    )
    checked = 0
    for _, sums in judge.details(plan).sync:
        for tp in (1, 2):
            floor = tables.sync.by_layer("cpu", tp, 12, 12)[slice(*sums.layers)].sum()
            assert floor <= sums.seconds * (1 + 1e-9), (sums.layers, tp)
            checked += 1
    assert checked
