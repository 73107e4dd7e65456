"""`make` says what it does: the order that runs, and which benchmark failed for which reason."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.machine import TARGET_MISSED
from tests.python_files import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

STATUS = {"fine": 0, "broken": 1, "without": 2, "missed": TARGET_MISSED}


def test_order_that_is_printed_is_the_one_that_runs():
    """A variable that asks for the time at each use may name two seconds."""
    done = make("--eval", "flavor: ; @echo $(flavor ORDER)", "flavor")
    assert done.stdout.split() == ["simple"], done.stderr


def test_order_can_be_given():
    done = make("-n", "test", "ORDER=17", "FOR_ALL=")
    assert "make test ORDER=17" in done.stdout
    assert "--randomly-seed 17" in done.stdout


def test_program_that_could_not_start_fails_make_bench_at_its_end(tmp_path):
    done = bench(tmp_path, "broken", "without", "missed", "fine")
    assert [line for line in done.stdout.splitlines() if not line.startswith("==")] == [
        "broken: FAILED with status 1",
        "without: could not be measured here",
        "missed: a target was missed",
        "the others need measurements: make bench MEASURED=DIR",
        "failed: broken",
    ]
    assert done.returncode != 0


def test_missed_target_does_not_fail_make_bench(tmp_path):
    done = bench(tmp_path, "missed", "without")
    assert done.returncode == 0, done.stderr


def bench(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Run `make bench` with a Python whose programs end with the status that their name says."""
    python = folder / "python"
    cases = " ".join(f"benchmarks.{name}) exit {status};;" for name, status in STATUS.items())
    python.write_text(f"#!/bin/sh\ncase $2 in {cases} esac\n", encoding="utf-8")
    python.chmod(0o755)
    return make("bench", f"BENCHES={' '.join(names)}", f"BIN={folder}", "FOR_ALL=", "MEASURED=")


def make(*words: str) -> subprocess.CompletedProcess[str]:
    # What the `make` that runs this test was given would reach this one, too.
    given = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ORDER")
    env = {key: value for key, value in os.environ.items() if key not in given}
    command = ["make", *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
