"""A worker is lost while sealing takes seconds: the others seal, and no step is lost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.sailord.local.running import ROOT

pytestmark = pytest.mark.slow


def test_step_that_survivors_seal_for_seconds_is_not_lost(folder):
    done = subprocess.run(
        [sys.executable, "-m", "tests.sailord.local.sealing_cluster", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["point"]["step"] >= told["killed_at"], "the leader began from the snapshot before"
    assert [move["steps_lost"] for move in told["moves"]] == [0, 0]
