"""What the search finds on clusters that are too large to be searched in full."""

from __future__ import annotations

from pathlib import Path

from planner.api import plan_job
from planner.problem.question import Question
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.job_file import load_job

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_pipelines_are_placed_one_by_one_where_that_is_faster() -> None:
    """By the rule of layout, the best known plan takes 5.378 s."""
    pool = Pool("us-central1-a", "A100-40", "a2-highgpu-4g", 4, 16)
    job = load_job(EXAMPLES / "opt-350m.toml")
    cluster = Cluster((pool,), load_catalogue())
    answer = plan_job(Question(job, cluster, Measurements(), "event", proves=False))
    assert answer.plan is not None
    assert answer.plan.together == 1
    assert answer.estimate is not None
    assert answer.estimate.iteration_s < 4.96
