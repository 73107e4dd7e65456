"""A job that was paused while another had the cluster continues from the memory of its nodes."""

from __future__ import annotations

import pytest

from tests.control.cluster import JOB
from tests.processes import wait_until

pytestmark = pytest.mark.slow
FAR = 60
"""Steps after which a job that lost its state is held instead of starting over."""


def test_a_resumed_job_loses_no_step_to_the_job_in_between(cluster):
    """It names no place for checkpoints, and its turn comes when the other job ends."""
    cluster.begin("a", "b")
    head = cluster.head
    wait_until(lambda: cluster.is_running(beyond=FAR))
    code, said = head.ask("POST", "/v1/jobs", {"job": JOB, "id": "k"})
    assert code == 201, said
    order(head, "j/pause")
    wait_until(lambda: has_cluster(cluster, "k") and cluster.is_running())
    order(head, "j/resume")
    wait_until(lambda: state_of(head) == "queued")
    order(head, "k/cancel")
    wait_until(lambda: has_cluster(cluster, "j") or state_of(head) == "held")
    wait_until(lambda: cluster.is_running() or state_of(head) == "held")
    assert state_of(head) == "running", cluster.history()
    (opened,) = (line for line in cluster.history() if line.startswith("generation 2 on"))
    assert "(memory, 0 steps lost)" in opened


def order(head, what):
    code, said = head.ask("POST", f"/v1/jobs/{what}")
    assert code == 202, said


def has_cluster(cluster, id_):
    job = cluster.job()
    return bool(job) and job["id"] == id_


def state_of(head):
    return head.ask("GET", "/v1/jobs/j")[1]["state"]
