"""A caller with a deadline gets a plan without an exhaustive search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from planner.api import plan_job
from planner.problem.question import Question
from simulator.api import load_measurements
from simulator.cluster.cluster_file import load_cluster
from simulator.inputs.job_file import load_job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_without_proof_a_small_case_is_not_searched_exhaustively():
    cluster = load_cluster(EXAMPLES / "three-zones.toml")
    first = replace(cluster.pools[0], gpus=4)
    cluster = replace(cluster, pools=(first,), quotas=())
    job = load_job(EXAMPLES / "small.toml")
    question = Question(job, cluster, load_measurements(None, catalogue=cluster.catalogue))
    proved, hurried = plan_job(question), plan_job(replace(question, proves=False))
    assert proved.plan is not None
    assert hurried.plan is not None
    assert hurried.estimate is not None
    assert hurried.evaluations < proved.evaluations
    assert hurried.estimate.iteration_s >= proved.estimate.iteration_s
