"""What one GPU of each kind is worth to a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.replan.replanner import Replanner
from sailord.planning.gpu_worths import gpu_worths
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.job_file import load_job
from simulator.models.presets import preset
from simulator.spec.job import Job

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
KINDS = "A100-40", "A100-80", "T4", "V100-16"


def worths(job: Job) -> dict[str, float]:
    replanner = Replanner(job, Cluster((), load_catalogue()), Measurements())
    return dict(gpu_worths(replanner, KINDS))


def test_kinds_are_worth_the_same_to_a_job_that_only_launches_kernels() -> None:
    """They were measured on computers of different speed, which the nodes do not have."""
    found = worths(load_job(EXAMPLES / "small.toml"))
    assert found == dict.fromkeys(KINDS, 1.0)


@pytest.mark.parametrize("micro_batch", [1, 8])
def test_faster_kinds_are_worth_more_to_a_large_model(micro_batch: int) -> None:
    job = Job("large", preset("llama-3-8b"), 8, 2048, precision="bf16")
    found = worths(replace(job, micro_batches=(micro_batch,)))
    assert found["T4"] < found["V100-16"] < min(found["A100-40"], found["A100-80"])
    assert max(found.values()) == 1
