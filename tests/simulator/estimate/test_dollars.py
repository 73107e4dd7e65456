"""The price of GPUs of a place with on-demand and spot pools."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.api import plan_job
from planner.problem.question import Question
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.cluster.place_facts import PlaceFacts
from simulator.hardware.catalogue import load_catalogue
from simulator.models.families import build_model
from simulator.network.network import MeasuredNetwork
from simulator.spec.job import Job, Objective
from simulator.spec.plan import Place

ZONE = "us-central1-a"
ON_DEMAND = Pool(ZONE, "T4", "T4x4", 4, 4, price_usd_per_gpu_hour=3.0, price_source="cluster file")
SPOT = replace(ON_DEMAND, gpus=8, spot=True, price_usd_per_gpu_hour=1.0)
PLACE = Place("T4", "T4x4", ZONE)


@pytest.mark.parametrize("pools", [(ON_DEMAND, SPOT), (SPOT, ON_DEMAND)])
def test_on_demand_gpus_are_charged_before_spot(pools: tuple[Pool, ...]) -> None:
    facts = PlaceFacts(Cluster(pools, load_catalogue()), MeasuredNetwork())
    assert facts.usd_per_hour(PLACE, 3) == 9.0
    assert facts.usd_per_hour(PLACE, 6) == 4 * 3.0 + 2 * 1.0
    assert facts.usd_per_hour(PLACE, 14) == 4 * 3.0 + 10 * 1.0
    assert facts.price_usd_per_gpu_hour(PLACE) == 1.0


def test_unknown_price_matters_only_if_its_pool_is_used() -> None:
    unpriced = replace(SPOT, price_usd_per_gpu_hour=None, price_source="unknown")
    facts = PlaceFacts(Cluster((ON_DEMAND, unpriced), load_catalogue()), MeasuredNetwork())
    assert facts.usd_per_hour(PLACE, 4) == 12.0
    assert facts.usd_per_hour(PLACE, 5) is None
    assert facts.price_usd_per_gpu_hour(PLACE) is None


@pytest.mark.parametrize("share", [0.0, 0.5, 0.7])
def test_plans_respect_the_spot_share_limit(share: float) -> None:
    model = build_model("gpt2", layers=4, hidden=64, heads=4, vocab=512, sequence=64)
    objective = Objective(max_spot_share=share)
    job = Job("spot", model, 24, 64, micro_batches=(1, 2), objective=objective)
    cluster = Cluster((SPOT, ON_DEMAND), load_catalogue())
    answer = plan_job(Question(job, cluster, Measurements()))
    assert answer.plan is not None
    assert answer.estimate is not None
    used = answer.plan.device_count
    assert max(0, used - ON_DEMAND.gpus) <= share * used
    hourly = min(used, 4) * 3.0 + max(0, used - 4) * 1.0
    paid = answer.estimate.money.compute_usd
    assert paid == pytest.approx(hourly * answer.estimate.iteration_s / 3600)
