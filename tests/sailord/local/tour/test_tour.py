"""The tour's texts are derived from what happened, and all of its events happen."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from sailord.local.tour.plan_holders import middle_node, replicated_holders, sole_holders
from sailord.local.tour.reference_run import largest_difference
from sailord.local.tour.step_log import StepLog
from sailord.local.tour.tour_runner import PHASES
from tests.processes import SAILORCTL
from tests.sailord.local.running import ROOT


def plan(*pipelines: dict[str, tuple[int, int]]) -> dict:
    """A plan by node and layers; a node of two kinds of places is one that a split would give."""
    return {
        "pipelines": [
            {"stages": [{"layers": list(layers), "node": node} for node, layers in one.items()]}
            for one in pipelines
        ]
    }


def test_sole_and_replicated_holders_of_layers_are_found():
    two = plan({"a": (0, 2), "b": (2, 4)}, {"c": (0, 1), "d": (1, 3), "e": (3, 4)})
    assert sole_holders(two) == []
    assert replicated_holders(two) == ["a", "b", "c", "d", "e"]
    assert replicated_holders(two, longest_first=True) == ["c", "d", "e", "a", "b"]
    assert middle_node(["c", "d", "e"], two) == "d"
    assert middle_node(["a", "b"], two) == "a", "where all stand at an end, the first"


def test_nodes_of_a_single_pipeline_are_sole_holders():
    one = plan({"a": (0, 2), "b": (2, 4)})
    assert sole_holders(one) == ["a", "b"]
    assert replicated_holders(one) == []


def line(generation: int, step: int, at: float, loss: float, job: str = "tale") -> str:
    said = {"job": job, "generation": generation, "step": step, "at": at, "loss": loss}
    said["sample_hash"] = f"of {step}"
    return json.dumps(said) + "\n"


def test_step_log_reads_the_lines_of_every_worker(tmp_path):
    homes = [tmp_path / node / "process" / "tale.1.0" for node in ("a1", "a2")]
    for home in homes:
        home.mkdir(parents=True)
    log = StepLog(tmp_path, "tale")
    (homes[0] / "output").write_text(
        "generation 1 rank 0\n"
        + line(1, 1, 10.0, 5.0)
        + line(1, 2, 11.5, 4.0)
        + line(1, 3, 12, 3.0)
    )
    (homes[1] / "output").write_text(line(1, 2, 11.0, 4.0) + line(1, 9, 1.0, 1.0, job="other"))
    log.read_new_lines()
    assert log.highest(1) == 3
    assert log.highest(2) == 0
    assert log.find(1, 2).at == 11.0, "the first that said so"
    assert log.median_s(1) == 1.0
    with (homes[0] / "output").open("a") as output:
        output.write(line(2, 3, 14.0, 3.5) + line(2, 4, 15.0, 2.5)[:-5])
    log.read_new_lines()
    assert log.losses() == {1: 5.0, 2: 4.0, 3: 3.5}, "of the generation that did it for good"
    with (homes[0] / "output").open("a") as output:
        output.write(line(2, 4, 15.0, 2.5)[-5:])
    log.read_new_lines()
    assert log.highest(2) == 4


def test_largest_difference_of_two_runs_is_relative():
    assert largest_difference({1: 5.0, 2: 4.0}, {1: 5.0, 2: 4.0}) == 0.0
    assert largest_difference({1: 5.0, 2: 4.4}, {1: 5.0, 2: 4.0}) == pytest.approx(0.1)
    assert largest_difference({1: 5.0}, {1: 5.0, 2: 4.0}) == math.inf
    assert largest_difference({}, {}) == math.inf


@pytest.mark.slow
def test_the_tour_loses_nothing():
    base = Path(tempfile.mkdtemp(prefix="tour-"))
    try:
        done = subprocess.run(
            [*SAILORCTL, "tour", "--folder", str(base / "c"), "--out", str(base / "tour.json")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "COLUMNS": "200"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        told = json.loads((base / "tour.json").read_text())
        assert [path.name for path in base.iterdir()] == ["tour.json"]
    finally:
        shutil.rmtree(base)
    kinds = {event["kind"] for event in told["events"]}
    assert kinds == {"notice", "loss", "loss of the only copy", "addition"}
    for event in told["events"]:
        assert set(event["phases"]) == set(PHASES)
        assert None not in event["phases"].values()
        assert event["steps_lost"] == 0 or event["kind"] == "loss of the only copy"
    assert told["loss_equals_uninterrupted"] is True
    assert told["final_step"] > 16
    assert told["exact"]["largest_relative_difference"] == 0.0
