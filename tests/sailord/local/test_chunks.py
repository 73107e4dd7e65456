"""A submitted job trains with chunks, loses nodes, and goes on with or without chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sailord.local.running import told_by

pytestmark = pytest.mark.slow


def lose(folder: Path, nodes: int, *events: str) -> dict[str, Any]:
    """Lose nodes under a job with chunks; its losses are bit-equal to those without events."""
    told: dict[str, Any] = told_by("chunked_cluster", folder, nodes, *events)
    assert told["steps"] > 0
    assert told["difference"] == 0.0
    return told


def test_a_job_with_chunks_goes_on_with_them_and_then_without(folder):
    told = lose(folder, 5, *["lose_the_only_copy"] * 2)
    # Pipelines, nodes and chunks: at first, on the spare node, and where three nodes are left.
    assert told["shapes"] == [[1, 4, 2], [1, 4, 2], [1, 3, 1]]
    assert max(told["lost"]) <= 1, "at most the step in progress: there is one pipeline"


def test_replicas_with_chunks_lose_no_step(folder):
    told = lose(folder, 8, "lose_a_replica")
    before, after = told["shapes"]
    assert before == [2, 8, 2]
    assert after[1] < 8
    assert told["lost"] == [0]
