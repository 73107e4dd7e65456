"""``max_spot_share``: a plan that keeps it is found where most GPUs are spot."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from planner.api import find_plan, plan_job
from planner.event_planner import STOPPED
from planner.problem.contracts import with_less_spot
from planner.problem.inventory import gpus_by_lot, lots_of, spot_share
from planner.problem.question import Question
from planner.search.search_cache import SearchCache
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.cluster.place_facts import PlaceFacts
from simulator.hardware.catalogue import load_catalogue
from simulator.models.families import build_model
from simulator.spec.job import Job, Objective
from tests.planner.search.test_oracle import every_unplaced_plan
from tests.planner.small_cases import SmallCase, is_possible, random_case

ZONE = "us-central1-a"
STEADY = Pool(ZONE, "T4", "T4x2", 2, 8, price_usd_per_gpu_hour=3.0, price_source="cluster file")
SPOT = replace(STEADY, gpus=32, spot=True, price_usd_per_gpu_hour=1.0)
LARGE = build_model("gpt2", layers=12, hidden=4096, heads=16, vocab=512, sequence=1024)


def job_with(share: float) -> Job:
    return Job("large", LARGE, 256, 1024, objective=Objective(max_spot_share=share))


def gpus_of(clusters: list[Cluster]) -> list[list[int]]:
    return [[pool.gpus for pool in cluster.pools] for cluster in clusters]


def test_spot_gpus_are_left_out_together_then_but_one_pool_then_all() -> None:
    other = replace(SPOT, zone="us-west1-b", gpus=16)
    cluster = Cluster((STEADY, SPOT, other), load_catalogue())
    found = gpus_of(list(with_less_spot(cluster, 0.6)))
    assert found == [[8, 8, 4], [8, 12, 0], [8, 0, 12], [8, 0, 0]]
    assert gpus_of(list(with_less_spot(cluster, 0.0))) == [[8, 0, 0]]
    for share in (None, 1.0):
        assert not list(with_less_spot(cluster, share))
    assert not list(with_less_spot(Cluster((SPOT,), load_catalogue()), 0.5))


def test_a_model_that_fits_on_all_on_demand_gpus_alone_gets_a_plan_without_spot() -> None:
    cluster = Cluster((STEADY, SPOT), load_catalogue())
    answer = plan_job(Question(job_with(0.0), cluster, Measurements()))
    assert answer.plan is not None, answer.problems
    assert answer.plan.device_count <= STEADY.gpus
    alone = Cluster((STEADY,), load_catalogue())
    same = plan_job(Question(job_with(0.0), alone, Measurements()))
    assert answer.objective == same.objective
    assert answer.lower_bound <= same.lower_bound, "the bound is that of all GPUs"


def test_a_job_without_the_limit_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster((STEADY, SPOT), load_catalogue())
    free = replace(job_with(0.0), objective=Objective())
    question = Question(free, cluster, Measurements(), budget=20, is_bounded=False)
    usual = find_plan(question, SearchCache())
    monkeypatch.setattr("planner.event_planner.with_less_spot", lambda *_: ())
    assert find_plan(question, SearchCache()) == usual


def test_an_interruption_keeps_a_plan_that_was_found_on_part_of_the_spot_gpus() -> None:
    cluster = Cluster((STEADY, SPOT), load_catalogue())
    told: list[str] = []
    question = Question(job_with(0.0), cluster, Measurements(), is_bounded=False, told=told.append)
    whole = find_plan(question, SearchCache())
    count = itertools.count(5)

    def interrupt(_: str) -> None:
        if next(count) == len(told):
            raise KeyboardInterrupt

    asked = replace(question, told=interrupt, is_bounded=True, is_stoppable=True)
    answer = find_plan(asked, SearchCache())
    assert answer.note == STOPPED
    assert answer.plan is not None
    assert whole.objective is not None
    assert whole.objective <= (answer.objective or 0.0)
    free = replace(job_with(0.0), objective=Objective())
    fastest = find_plan(replace(question, job=free, told=None), SearchCache()).objective
    assert fastest is not None
    assert answer.lower_bound <= fastest, "the bound is that of all GPUs"


def mostly_spot(seed: int) -> SmallCase:
    """Seven to nine GPUs, which are too many to search to the end; at most three are on demand."""
    rng = random.Random(f"spot share {seed}")
    has_zones = seed % 4 == 0
    case = random_case(rng, gpus_max=1, layers_max=2, batch=2 if has_zones else 4)
    pool = replace(case.cluster.pools[0], machine="T4x1", gpu="T4", gpus_per_machine=1, zone=ZONE)
    spot = replace(pool, gpus=6, spot=True, zone="us-west1-b" if has_zones else ZONE)
    pools = (replace(pool, gpus=rng.randint(1, 3)), spot)
    objective = Objective(max_spot_share=rng.choice([0.0, 0.25, 0.5]))
    job = replace(case.job, max_tp=1, objective=objective)
    return replace(case, job=job, cluster=replace(case.cluster, pools=pools))


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("kind", ["event", "paper"])
def test_a_share_of_spot_that_some_plan_keeps_is_not_refused(kind: str, examples: int) -> None:
    kept = 0
    for seed in range(max(8, examples // 5)):
        case = mostly_spot(seed)
        facts = PlaceFacts(case.cluster, case.measurements.network)
        lots, most = lots_of(case.cluster, facts), case.job.objective.max_spot_share
        judge, best = case.judge, float("inf")
        for plan in every_unplaced_plan(case):
            if not is_possible(case, plan) or spot_share(gpus_by_lot(plan, lots), lots) > most:
                continue
            found = judge.estimate(plan) if kind == "event" else case.paper(plan)
            if found is not None and found.fits:
                best = min(best, found.iteration_s)
        answer = plan_job(Question(case.job, case.cluster, case.measurements, kind))
        assert (answer.plan is not None) == (best < float("inf")), seed
        if answer.plan is not None:
            kept += 1
            assert answer.estimate is not None
            assert spot_share(gpus_by_lot(answer.plan, lots), lots) <= most
            assert answer.lower_bound_s <= best * (1 + 1e-9), seed
            assert answer.estimate.iteration_s <= best * 1.1, seed
    assert kept
