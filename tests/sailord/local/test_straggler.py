"""A node that becomes slow is found among real processes, and planned around with nothing lost."""

from __future__ import annotations

import pytest

from tests.sailord.local.running import told_by

pytestmark = pytest.mark.at_length


def test_a_node_that_becomes_slow_is_planned_around_with_nothing_lost(folder):
    told = told_by("straggler_cluster", folder)
    assert "a2" in told["before"], "it helped"
    assert set(told["after"]) == set(told["before"]) - {"a2"}
    assert told["reason"].startswith("a2 is slow: it computes ")
    assert told["marked"]["slow"].startswith("it computes ")
    assert told["failures"] == 0
    assert [move["steps_lost"] for move in told["moves"]] == [0, 0]
    texts = [line["text"] for line in told["history"]]
    assert any(text.startswith("stopping: a2 is slow") for text in texts)
