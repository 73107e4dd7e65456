"""A submitted job trains with chunks, loses nodes, and goes on with or without chunks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.sailord.local.running import ROOT

pytestmark = pytest.mark.slow


def test_a_job_with_chunks_survives_losses_with_the_same_losses(folder):
    done = subprocess.run(
        [sys.executable, "-m", "tests.sailord.local.chunked_cluster", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    # Pipelines, nodes and chunks: at first, on the spare node, and where three are left.
    assert told["shapes"] == [[1, 4, 2], [1, 4, 2], [1, 3, 1]]
    assert max(told["lost"]) <= 1, "at most the step in progress: there is one pipeline"
    assert told["steps"] > 0
    assert told["difference"] == 0.0, "losses are bit-equal to those without events"
