"""Replicas are placed where the loss that they guard against does not reach."""

from __future__ import annotations

import pytest

from worker.checkpoint.placement import buddies_of, waits_for_replicas
from worker.checkpoint.snapshot_file import ANY_NODE

NODES = {0: "a", 1: "b", 2: "c"}
KEY = (0, 0)


def buddy(holders: tuple[int, ...], zones: str, survive: str) -> str | None:
    """Return the buddy of a piece that rank 0 writes; each letter is a node's zone."""
    named = dict(zip("abc", zones, strict=True))
    found = buddies_of({KEY: holders}, {KEY: 0}, {KEY: 8}, NODES, named, survive)
    return found.get(KEY)


@pytest.mark.parametrize(
    ("holders", "zones", "node", "zone"),
    [
        ((0,), "xyx", "c", "b"),  # Same zone if a node may be lost; another zone if a zone may.
        ((0, 2), "xyx", None, "b"),  # Both holders are in one zone.
        ((0, 1), "xyx", None, None),
        ((0,), "xxx", "b", "b"),  # There is no other zone: another node is better than none.
        ((0, 1), "xxx", None, ANY_NODE),  # A node outside of the plan may be elsewhere.
    ],
)
def test_replica_survives_what_the_job_must_survive(holders, zones, node, zone):
    assert buddy(holders, zones, "node") == node
    assert buddy(holders, zones, "zone") == zone


ALONE = {0: "a", 1: "a"}


@pytest.mark.parametrize("survive", ["node", "zone"])
def test_single_node_job_has_its_replica_on_any_other_node(survive):
    found = buddies_of({KEY: (0, 1)}, {KEY: 0}, {KEY: 8}, ALONE, {"a": "x"}, survive)
    assert found == {KEY: ANY_NODE}


@pytest.mark.parametrize(
    ("buddies", "nodes", "known", "waits"),
    [
        ({}, NODES, "abc", False),
        ({KEY: "b"}, NODES, "abc", True),
        ({KEY: ANY_NODE}, ALONE, "a", False),
        ({KEY: ANY_NODE}, ALONE, "ab", True),
        ({KEY: ANY_NODE}, NODES, "abc", True),
        ({KEY: ANY_NODE}, NODES, "abcd", True),
    ],
    ids=["safe", "named", "no other node", "standby node", "no nodes known", "another node known"],
)
def test_all_nodes_agree_on_waiting_for_replicas(buddies, nodes, known, waits):
    """Agents may have read the list of nodes at different times."""
    assert waits_for_replicas(buddies, nodes, dict.fromkeys(known, "x")) is waits
