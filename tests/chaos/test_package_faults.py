"""A script's folder reaches its nodes whatever is killed, damaged or full on the way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agents.daemon.process_cleanup import kill_all
from tests.chaos.package_faults import FAULTS
from tests.chaos.test_storm import MINUTES


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.skipif(not MINUTES, reason="make chaos MINUTES=… tries it")
def test_jobs_are_done_in_spite_of_faults_on_the_way(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.chaos.package_faults", str(tmp_path)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    finally:
        kill_all(tmp_path / "c")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: each["state"] for name, each in found.items()} == dict.fromkeys(found, "done")
    assert found.keys() >= set(FAULTS)
    (held,) = found["package_damaged_at_sailord"]["held"]
    assert "differs from its name after the transfer" in held
    assert not found["agent_killed_in_a_setup"]["held"]
