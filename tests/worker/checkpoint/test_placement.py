"""Copies of what one loss would take stand where that loss does not reach."""

from __future__ import annotations

import pytest

from worker.checkpoint.placement import buddies_of, waits_for_replicas
from worker.checkpoint.snapshot_file import ANY_NODE

NODES = {0: "a", 1: "b", 2: "c"}
KEY = (0, 0)


def buddy(holders: tuple[int, ...], zones: str, survive: str) -> str | None:
    """Where the copy goes of a piece that rank 0 writes; each node's zone is a letter."""
    named = dict(zip("abc", zones, strict=True))
    found = buddies_of({KEY: holders}, {KEY: 0}, {KEY: 8}, NODES, named, survive)
    return found.get(KEY)


@pytest.mark.parametrize(
    ("holders", "zones", "node", "zone"),
    [
        ((0,), "xyx", "c", "b"),  # Near, where a node may be lost; far, where a zone may.
        ((0, 2), "xyx", None, "b"),  # Two nodes of one zone go together.
        ((0, 1), "xyx", None, None),
        ((0,), "xxx", "b", "b"),  # There is no other zone: another node is better than none.
        ((0, 1), "xxx", None, ANY_NODE),  # Somebody may stand by elsewhere, who is no member.
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
    ids=["safe", "named", "nobody else", "one stands by", "told nothing", "told of another"],
)
def test_all_nodes_agree_on_waiting_for_replicas(buddies, nodes, known, waits):
    """Nodes read at other moments who stands by: a plan of several waits, whatever they know."""
    assert waits_for_replicas(buddies, nodes, dict.fromkeys(known, "x")) is waits
