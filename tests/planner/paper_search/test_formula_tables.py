"""What the paper's search charges for GPUs of a place that has both contracts."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from planner.api import plan_job
from planner.problem.question import Question
from simulator.api import estimator
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.spec.job import Objective
from tests.planner.small_cases import random_case

STEADY = Pool(
    "us-central1-a", "A100-40", "A100-40x4", 4, 8, price_usd_per_gpu_hour=3.0, price_source="file"
)
SPOT = replace(STEADY, spot=True, price_usd_per_gpu_hour=1.0)


@pytest.mark.parametrize(
    "objective",
    [
        Objective(max_usd_per_hour=10.0, max_spot_share=0.0),
        # The third job does not fit on eight GPUs, so that its plan pays spot GPUs first.
        Objective(max_usd_per_hour=25.5),
        Objective(goal="cost"),
    ],
)
def test_gpus_of_two_contracts_are_charged_in_order(objective: Objective) -> None:
    most, firsts = objective.max_usd_per_hour or math.inf, set()
    for seed in range(3):
        case = random_case(random.Random(f"both contracts {seed}"), layers_max=3, batch=8)
        cluster = Cluster((STEADY, SPOT), load_catalogue())
        job = replace(case.job, objective=objective)
        answer = plan_job(Question(job, cluster, case.measurements, "paper"))
        if answer.plan is None or answer.estimate is None:
            continue
        firsts.add(answer.pays_spot_first)
        first, then = (1.0, 3.0) if answer.pays_spot_first else (3.0, 1.0)
        gpus = answer.plan.device_count
        usd = first * min(gpus, 8) + then * max(0, gpus - 8)
        assert usd <= most, seed
        paid = replace(cluster, pays_spot_first=answer.pays_spot_first)
        event = estimator("event", job=job, cluster=paid, measurements=case.measurements)
        for estimate in (answer.estimate, event.estimate(answer.plan)):
            assert estimate.money.compute_usd is not None
            per_hour = estimate.money.compute_usd / estimate.iteration_s * 3600
            assert per_hour == pytest.approx(usd), (seed, estimate.estimator)
    assert firsts == ({False, True} if most == 25.5 else {False})
