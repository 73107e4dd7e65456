"""A daemon dies at the place that a test names, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from agents.failing import FAIL_AT

LIFE = """
from agents.failing import reached
for generation in (1, 2):
    for name in ("open", "after open"):
        reached(name, generation)
        print(name, generation, flush=True)
"""
PLACES = ["open 1", "after open 1", "open 2", "after open 2"]


@pytest.mark.parametrize(
    ("where", "lived"),
    [("open", 0), ("after open", 1), ("open@2", 2), ("after open@2", 3), ("open@3", 4), ("", 4)],
)
def test_it_dies_there(where: str, lived: int):
    environment = {**os.environ, FAIL_AT: where} if where else dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", LIFE], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout.splitlines() == PLACES[:lived]
    assert done.returncode == (0 if lived == len(PLACES) else -signal.SIGKILL)
