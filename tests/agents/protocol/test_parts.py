"""Whose a node is, by the records of the jobs that share the cluster."""

from __future__ import annotations

import pytest

from agents.protocol.parts import is_of_another, job_of, takes_replicas
from agents.protocol.records import JobId, JobRecord, JobState, NodeId

A, B, C = (NodeId(name) for name in "abc")
J, K, L = (JobId(name) for name in "jkl")


def jobs(*records: JobRecord) -> dict[JobId, JobRecord]:
    return {each.id: each for each in records}


SHARED = jobs(
    JobRecord(J, "running"),
    JobRecord(K, "held", part=(B,)),
    JobRecord(L, "queued", coming=(A,)),
)


def test_a_node_is_of_the_job_that_names_it_else_of_the_one_that_names_none() -> None:
    assert (job_of(A, SHARED), job_of(B, SHARED)) == (J, K)
    alone = jobs(JobRecord(K, "running", part=(B,)))
    assert job_of(A, alone) is None, "a part without a job has it"


def test_while_one_job_has_the_cluster_no_record_says_whose_a_node_is() -> None:
    assert job_of(A, jobs(JobRecord(J, "running"), JobRecord(L, "queued"))) is None


@pytest.mark.parametrize(
    ("job", "state", "is_so"), [(J, "running", True), (J, "paused", False), (K, "held", False)]
)
def test_only_a_live_job_has_left_a_node_to_another(
    job: JobId, state: JobState, is_so: bool
) -> None:
    """Of one that is paused, the memory of any node may have the last copy."""
    records = {**SHARED, job: JobRecord(job, state, part=SHARED[job].part)}
    assert is_of_another(B, job, records) is is_so


def test_replicas_go_to_nodes_that_the_job_has_and_keeps() -> None:
    assert not takes_replicas(A, J, SHARED), "it drains to go to another job"
    assert takes_replicas(C, J, SHARED)
    assert not takes_replicas(B, J, SHARED)
    assert takes_replicas(B, K, SHARED)
