"""Real processes under faults: nothing that counts is lost, and nothing is left behind.

Only `make chaos` tries it: it lets everybody die at every named point and then at pairs of them,
and gives the storm as long. How soon all is well again hangs on how busy the machine is, and so it
is nothing for a test that must tell the same each time; `tests/local` has a short story of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.agents.store.places import ETCD
from tests.chaos.points import ALL

ROOT = Path(__file__).resolve().parents[2]
MINUTES = float(os.environ.get("SAILOR_CHAOS_MINUTES", "0"))
SEED = os.environ.get("SAILOR_CHAOS_SEED", "1")
JOB = os.environ.get("SAILOR_CHAOS_JOB", "exact")
pytestmark = [
    *(pytest.mark.chaos, pytest.mark.slow, pytest.mark.torch),
    pytest.mark.skipif(not MINUTES, reason="make chaos MINUTES=… tries it"),
]


def weather(name: str, *words: str) -> str:
    """Let there be a storm; return what it said. What `make chaos` records stays."""
    base = Path(tempfile.mkdtemp(prefix="ch-"))  # Sockets have short addresses.
    out = ROOT / "build" / "chaos" / name
    try:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.chaos", "--seed", SEED, "--job", JOB),
                *words,
                *("--folder", str(base / "c"), "--out", str(out)),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert not (base / "c").exists()
    finally:
        shutil.rmtree(base)
    print(done.stdout)
    return done.stdout


@pytest.mark.parametrize(("store", "checkpoints"), [("embedded", "folder"), ("etcd", "objects")])
def test_a_storm_of_faults_changes_no_loss(store: str, checkpoints: str):
    if store == "etcd" and ETCD is None:
        pytest.skip("there is no etcd here: install etcd-server")
    words = "--store", store, "--checkpoints", checkpoints
    assert "; 0 violations" in weather(f"storm-{store}", "--seconds", str(MINUTES * 60), *words)


def test_whoever_dies_at_a_named_point_the_job_goes_on():
    weather("points", "--points", str(len(ALL)), "--pairs", str(MINUTES * 20), "--seconds", "0")
