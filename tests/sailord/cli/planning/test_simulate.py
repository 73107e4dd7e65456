"""``sailorctl`` as a person or a script meets it: exit codes, streams, mistakes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO

import jsonschema
import pytest

from tests.simulator.test_run_file import RUN

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = f"{sys.executable} -m sailord.cli.main"
PLAN, JOB, CLUSTER = (
    ROOT / "examples" / name for name in ("opt-350m-plan.json", "opt-350m.toml", "three-zones.toml")
)
DONE, FAILED, UNUSABLE, DOES_NOT_FIT = 0, 1, 2, 3


def run(
    *arguments: object, stdout: IO[str] | int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM.split(), *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
    )


def greedy(folder: Path) -> Path:
    """A plan that no V100 can hold."""
    stage = {"layers": [0, 26], "tp": 1, "gpu": "V100-16", "zone": "us-west1-a"}
    path = folder / "greedy.json"
    pipelines = [{"micro_batches": 128, "stages": [stage]}]
    path.write_text(json.dumps({"micro_batch_size": 8, "pipelines": pipelines}))
    return path


def test_an_estimate_is_printed_as_text_or_json() -> None:
    page = run("simulate", PLAN, JOB, CLUSTER)
    assert page.returncode == DONE
    assert "bottleneck" in page.stdout
    found = run("simulate", PLAN, JOB, CLUSTER, "--json")
    document = json.loads(found.stdout)
    schema = ROOT / "simulator" / "data" / "schemas" / "estimate.schema.json"
    jsonschema.validate(document, json.loads(schema.read_text("utf-8")))
    assert document["fits"] is True
    assert document["gpus_used"]["V100-16@us-west1-a"] == 8


def test_a_plan_too_large_is_estimated_with_a_fitting_alternative(tmp_path: Path) -> None:
    result = run("simulate", greedy(tmp_path), JOB, CLUSTER, "--json")
    assert result.returncode == DOES_NOT_FIT
    assert json.loads(result.stdout)["misfits"] == [
        line.removeprefix("does not fit: ") for line in result.stderr.splitlines()
    ]
    assert "GiB more than" in result.stderr
    assert "it would fit with" in result.stderr


def test_the_suggested_cure_works(tmp_path: Path) -> None:
    path = greedy(tmp_path)
    plan = json.loads(path.read_text())
    assert "micro batches of 2 (and 512" in run("simulate", path, JOB, CLUSTER).stderr
    plan["micro_batch_size"], plan["pipelines"][0]["micro_batches"] = 2, 512
    path.write_text(json.dumps(plan))
    assert run("simulate", path, JOB, CLUSTER).returncode == DONE


def test_the_mistakes_of_all_files_are_reported_together(tmp_path: Path) -> None:
    job, cluster = tmp_path / "job.toml", tmp_path / "cluster.toml"
    job.write_text("[training]\nglobal_batch = -1\n")
    cluster.write_text("")
    result = run("simulate", tmp_path / "none.json", job, cluster)
    assert result.returncode == UNUSABLE
    assert result.stdout == ""
    for place in ("job.toml", "cluster.toml", "none.json"):
        assert place in result.stderr
    assert "Traceback" not in result.stderr


def test_files_in_the_wrong_order_get_one_error_each() -> None:
    result = run("simulate", JOB, PLAN, CLUSTER)
    assert result.returncode == UNUSABLE
    assert len(result.stderr.splitlines()) == 2
    assert "looks like a job, not a plan; swapped? The order is PLAN JOB CLUSTER" in result.stderr


def test_an_output_never_overwrites_an_input(tmp_path: Path) -> None:
    plan = Path(shutil.copy(PLAN, tmp_path / "plan.json"))
    before = plan.read_bytes()
    result = run("simulate", plan, JOB, CLUSTER, "--timeline", plan)
    assert result.returncode == UNUSABLE
    assert "would be overwritten" in result.stderr
    assert plan.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_full_disk_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        result = run("simulate", PLAN, JOB, CLUSTER, stdout=full)
    assert result.returncode == FAILED
    assert "cannot write the output: No space left" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_closed_output_pipe_is_no_error() -> None:
    files = f"{PLAN} {JOB} {CLUSTER}"
    command = f"{PROGRAM} simulate {files} --json | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "0"
    assert result.stderr == ""


def test_profiles_that_the_job_does_not_name_are_pointed_out(reference: Path) -> None:
    result = run("simulate", PLAN, JOB, CLUSTER, "--profiles", reference)
    assert "set [model] profile to one of" in result.stdout


def test_validation_of_measured_runs_is_json(reference: Path) -> None:
    result = run("validate", reference / "validation.json", "--profiles", reference, "--json")
    assert result.returncode == DONE
    document = json.loads(result.stdout)
    assert len(document["time"]["cases"]) == 16
    assert document["failures"] == []


def test_a_run_that_cannot_be_estimated_fails_the_validation(
    reference: Path, tmp_path: Path
) -> None:
    runs = json.loads((reference / "validation.json").read_text("utf-8"))
    runs["cases"] = runs["cases"][:2]
    runs["cases"][0]["plan"]["stages"][0]["replicas"][0]["gpu_type"] = "V200"
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(runs))
    result = run("validate", path, "--profiles", reference)
    assert result.returncode == FAILED
    assert '"V200"' in result.stderr


def measured_runs(folder: Path, *measured: dict[str, float]) -> Path:
    runs = [RUN | {"id": f"run {number}", "measured": each} for number, each in enumerate(measured)]
    path = folder / "runs.json"
    path.write_text(json.dumps({"runs": runs}))
    return path


def test_validation_prints_the_figures_of_its_json(tmp_path: Path) -> None:
    path = measured_runs(tmp_path, {"iteration_s": 0.5}, {"iteration_s": 0.6}, {})
    text, found = run("validate", path), run("validate", path, "--json")
    assert text.returncode == found.returncode == DONE
    assert "note: run 2: not compared" in text.stderr
    heading, _, row = text.stdout.splitlines()[-3:]
    for name in ("mean %", "median %", "max %", "bias %", "inside error bar",
                 "rank correlation", "pairs right", "regret"):  # fmt: skip
        assert name in heading
    here = json.loads(found.stdout)["sources"]["here"]
    assert f"{here['mean_abs_pct']:.2f}" in row
    assert f"{here['bias_pct']:+.2f}" in row
    assert f"{here['regret_max']:.3f}" in row


def test_runs_without_any_measurement_fail_the_validation(tmp_path: Path) -> None:
    result = run("validate", measured_runs(tmp_path, {}, {}))
    assert result.returncode == FAILED
    assert "run 0 and 1 other: not compared" in result.stderr
    assert "no run has a valid measurement" in result.stderr


@pytest.mark.parametrize("command", ["simulate", "validate", "plan", "compare"])
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.returncode == DONE
    assert "--json" in result.stdout
