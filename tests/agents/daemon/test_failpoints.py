"""Fail points kill the process at the named place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from agents.daemon.failpoints import FAIL_AT

LIFE = """
from agents.daemon.failpoints import failpoint
for generation in (1, 2):
    for name in ("open", "after open"):
        failpoint(name, generation)
        print(name, generation, flush=True)
"""
PLACES = ["open 1", "after open 1", "open 2", "after open 2"]


@pytest.mark.parametrize(
    ("where", "lived"),
    [("open", 0), ("after open", 1), ("open@2", 2), ("after open@2", 3), ("open@3", 4), ("", 4)],
)
def test_a_process_dies_at_its_fail_point_and_nowhere_else(where: str, lived: int):
    environment = {**os.environ, FAIL_AT: where} if where else dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", LIFE], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout.splitlines() == PLACES[:lived]
    assert done.returncode == (0 if lived == len(PLACES) else -signal.SIGKILL)


WRITTEN = """
import sys
from pathlib import Path
from agents.daemon.failpoints import failpoint
file = Path(sys.argv[1])
failpoint("open", 1)
file.write_text("open@2")
for generation in (1, 2):
    failpoint("open", generation)
    print(generation, flush=True)
"""


def test_a_fail_point_in_a_file_kills_once(tmp_path):
    file = tmp_path / "fails"
    environment = {**os.environ, FAIL_AT: str(file)}
    words = [sys.executable, "-c", WRITTEN, str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert (done.stdout, done.returncode) == ("1\n", -signal.SIGKILL)
    assert not file.exists()
