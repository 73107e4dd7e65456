"""The statuses of a node's workers, taken together."""

from __future__ import annotations

from agents.protocol.records import Hang, NodeId, Sealing
from agents.workers.status import WorkerStatus, agreed_at, combine, contradicted_of


def test_missing_state_is_reported_with_the_peers_that_may_have_had_it():
    fetched = WorkerStatus(generation=2, rank=0, taking="rebuilding")
    missing = WorkerStatus(
        2, 1, "broken", broken_peers=(NodeId("b"),), failure="no source has piece 2 of layer 1"
    )
    told = combine([fetched, missing])
    assert (told.taking, told.broken_peers) == ("broken", ("b",))
    assert told.failure == "rank 1: no source has piece 2 of layer 1"


def test_node_has_sealed_when_its_slowest_worker_has():
    statuses = [
        WorkerStatus(3, 0, "broken", 41, (NodeId("b.1"),)),
        WorkerStatus(3, 1, "running", 41, (NodeId("b.1"),), sealing=Sealing(41, 2.0)),
        WorkerStatus(3, 2, "running", 40, (NodeId("b.1"),), sealing=Sealing(40, 3.0)),
    ]
    assert combine(statuses).sealing == Sealing(41, 3.0)
    assert combine(statuses[:1]).sealing is None


def test_a_hang_that_any_worker_sees_is_reported():
    seen = Hang("rank 2 has not arrived (computing)", (NodeId("c"),))
    statuses = [WorkerStatus(3, 0, "running"), WorkerStatus(3, 1, "running", hang=seen)]
    assert combine(statuses).hang == seen
    assert combine(statuses[:1]).hang is None


def test_failed_logger_of_one_worker_is_reported():
    statuses = [WorkerStatus(3, 1, "running"), WorkerStatus(3, 0, "running", unlogged="no disk")]
    assert combine(statuses).measured.unlogged == "no disk"
    assert combine(statuses[:1]).measured.unlogged == ""


def test_all_contradicted_nodes_are_reported():
    b, c = NodeId("b"), NodeId("c")
    statuses = [WorkerStatus(3, rank, "failed", contradicted=(c, b)[rank:]) for rank in range(2)]
    assert contradicted_of(statuses) == (b, c)
    assert contradicted_of([WorkerStatus(3, 0, "running")]) == ()


def test_earliest_step_after_which_replicas_agreed_is_reported():
    statuses = [
        WorkerStatus(3, rank, "failed", agreed_at=(40, None, 20)[rank]) for rank in range(3)
    ]
    assert agreed_at(statuses) == 20
    assert agreed_at([WorkerStatus(3, 0, "running")]) is None
