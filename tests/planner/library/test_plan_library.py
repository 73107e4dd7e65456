"""The library of a job's plans, without a search."""

from __future__ import annotations

from dataclasses import replace

from planner.library.plan_library import PlanLibrary
from planner.problem.question import Question
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.models.presets import preset
from simulator.spec.job import Job

POOL = Pool("us-central1-a", "A100-40", "a2-highgpu-4g", 4, 16)
SPOT = replace(POOL, spot=True)
KEY = "A100-40/a2-highgpu-4g/us-central1-a"


def names(*pools: Pool) -> tuple[str, ...]:
    job = Job("named", preset("opt-125m"), 8, 128)
    return PlanLibrary(Question(job, Cluster(pools, load_catalogue()), Measurements())).names


def test_a_pool_is_named_by_its_place_and_by_what_else_tells_it_apart() -> None:
    left = replace(POOL, gpus_per_machine=2, gpus=2)
    assert names(POOL) == (KEY,)
    assert names(SPOT) == (KEY,)
    assert names(POOL, SPOT) == (KEY, f"{KEY} spot")
    assert names(POOL, left) == (f"{KEY} of 4", f"{KEY} of 2")
    assert names(SPOT, replace(left, spot=True)) == (f"{KEY} of 4", f"{KEY} of 2")
    assert names(POOL, left, SPOT) == (f"{KEY} of 4", f"{KEY} of 2", f"{KEY} spot")
