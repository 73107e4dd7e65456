"""Real processes under faults: no invariant is violated, and nothing leaks.

Only `make chaos` runs these tests, at every fail point, at pairs of them, and under random faults.
Recovery times depend on the load of the machine, so they are too flaky for `make test`;
`tests/sailord/local` has a short scenario.
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
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.skipif(not MINUTES, reason="make chaos MINUTES=… tries it"),
]


def run_storm(name: str, *words: str) -> str:
    """Run a storm and return its output; the recording stays under ``build/chaos``."""
    base = Path(tempfile.mkdtemp(prefix="ch-"))  # Socket paths must be short.
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
    assert "; 0 violations" in run_storm(f"storm-{store}", "--seconds", str(MINUTES * 60), *words)


def test_the_job_survives_a_crash_at_every_fail_point():
    run_storm("points", "--points", str(len(ALL)), "--pairs", str(MINUTES * 20), "--seconds", "0")
