"""Replicas are placed where the loss that they guard against does not reach."""

from __future__ import annotations

from collections import Counter

import pytest

from worker.checkpoint.placement import buddies_of, keepers_of, waits_for_replicas
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


def kept(holders: tuple[int, ...], nodes: dict[int, str], zones: str) -> tuple[int, ...]:
    """Return who keeps one piece; each letter is the zone of a node, in their order."""
    named = dict(zip(sorted(set(nodes.values())), zones, strict=True))
    return keepers_of({KEY: holders}, {KEY: 8}, nodes, named)[KEY]


def test_piece_is_kept_twice_and_in_each_zone_that_holds_it():
    nodes = dict(enumerate("aabbccdd"))
    everybody = tuple(nodes)
    assert len(kept(everybody, nodes, "xxxx")) == 2
    assert len({nodes[rank] for rank in kept(everybody, nodes, "xxxx")}) == 2
    assert [nodes[rank] for rank in kept(everybody, nodes, "xyyz")] == ["a", "b", "d"]
    assert kept((0, 1), nodes, "xxxx") == (0,), "one node: its replica is a buddy's"


def test_replicas_share_the_work_of_snapshots():
    nodes = dict(enumerate("a" * 8 + "b" * 8))
    holders = {(layer, 0): tuple(nodes) for layer in range(64)}
    sizes = dict.fromkeys(holders, 100)
    found = keepers_of(holders, sizes, nodes, dict.fromkeys("ab", "x"))
    load = Counter(rank for ranks in found.values() for rank in ranks)
    assert set(load.values()) == {8}, "each of 16 ranks keeps an eighth of its node's copy"
