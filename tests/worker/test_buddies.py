"""Copies of what one loss would take stand where that loss does not reach."""

from __future__ import annotations

import pytest

from worker.pieces import buddies_of

NODES = {0: "a", 1: "b", 2: "c"}
KEY = (0, 0)


def buddy(keepers: tuple[int, ...], zones: str, survive: str) -> str | None:
    """Where the copy goes of a piece that rank 0 writes; each node's zone is a letter."""
    named = dict(zip("abc", zones, strict=True))
    found = buddies_of({KEY: keepers}, {KEY: 0}, {KEY: 8}, NODES, named, survive)
    return found.get(KEY)


@pytest.mark.parametrize(
    ("keepers", "zones", "node", "zone"),
    [
        ((0,), "xyx", "c", "b"),  # Near, where a node may be lost; far, where a zone may.
        ((0, 2), "xyx", None, "b"),  # Two nodes of one zone go together.
        ((0, 1), "xyx", None, None),
        ((0,), "xxx", "b", "b"),  # There is no other zone: another node is better than none.
        ((0, 1), "xxx", None, None),
    ],
)
def test_a_copy_outlives_what_the_job_is_to_survive(keepers, zones, node, zone):
    assert buddy(keepers, zones, "node") == node
    assert buddy(keepers, zones, "zone") == zone
