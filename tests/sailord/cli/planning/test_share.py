"""The command ``share``: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sailord.cli.main import main
from tests.sailord.cli.planning.command_files import CLUSTER_TEXT, JOB_TEXT, run_on

JOB_FILE = JOB_TEXT.replace("[4, 8]", "[4]")
CLUSTER_FILE = CLUSTER_TEXT.replace("machine = 4", "machine = 1").replace("gpus = 16", "gpus = 3")
TOO_LARGE = JOB_FILE.replace("opt-125m", "opt-30b")


def run(
    folder: Path,
    *more: str,
    first: str = JOB_FILE,
    second: str = JOB_FILE,
    cluster: str = CLUSTER_FILE,
) -> Result:
    files = {"a.toml": first, "b.toml": second, "cluster.toml": cluster}
    return run_on(folder, "share", files, "--budget", "2", *more)


def test_each_job_gets_machines_and_a_plan_by_its_weight(tmp_path: Path) -> None:
    plans = tmp_path / "plans"
    done = run(tmp_path, "--weights", "2,1", "--searches", "4", "--json", "--save", str(plans))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    pool = "A100-40/A100-40x1/us-central1-a"
    assert [job["machines"] for job in found["jobs"]] == [{pool: 2}, {pool: 1}]
    assert found["idle"] == {pool: 0}
    assert [job["weight"] for job in found["jobs"]] == [2, 1]
    assert found["together"] == pytest.approx(sum(job["share_of_alone"] for job in found["jobs"]))
    assert [Path(job["file"]).name for job in found["jobs"]] == ["a.json", "b.json"]
    # The plan is one for this part: the simulator judges it alike.
    files = [str(plans / "a.json"), str(tmp_path / "a.toml"), str(tmp_path / "cluster.toml")]
    judged = CliRunner().invoke(main, ["simulate", *files, "--json"])
    assert json.loads(judged.stdout)["iteration_s"] == found["jobs"][0]["iteration_s"]


def test_names_that_give_one_file_name_get_files_of_their_own(tmp_path: Path) -> None:
    files = {"my job.toml": JOB_FILE, "my-job.toml": JOB_FILE, "cluster.toml": CLUSTER_FILE}
    options = ["--budget", "2", "--searches", "2", "--save", str(tmp_path / "plans")]
    done = run_on(tmp_path, "share", files, *options)
    assert done.exit_code == 0, done.output
    found = sorted(each.name for each in (tmp_path / "plans").iterdir())
    assert found == ["my-job-2.json", "my-job.json"]


def test_a_job_without_a_plan_leaves_everything_to_the_other(tmp_path: Path) -> None:
    done = run(tmp_path, "--searches", "2", second=TOO_LARGE)
    assert done.exit_code == 0, done.output
    first, second, together = done.stdout.splitlines()[2:5]
    assert first.split()[:2] == ["a", "1"]
    assert "100.0%" in first
    assert "it has no plan on the whole cluster" in second
    assert together.split() == ["together", "100.0%"]


def test_without_any_plan_it_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "--searches", "1", first=TOO_LARGE, second=TOO_LARGE)
    assert done.exit_code == 1, done.output
    assert done.stdout.count("it has no plan on the whole cluster") == 2


def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    late = JOB_FILE + '[objective]\ndeadline = "2030-01-01T00:00:00Z"\n'
    done = run(tmp_path, second=late, cluster=CLUSTER_FILE.replace("machine = 1", "machine = 2"))
    assert done.exit_code == 2
    assert "b: objective.deadline: is not kept where several jobs share" in done.stderr
    assert "A100-40@us-central1-a: has 3 GPUs on machines of 2" in done.stderr
    quota = '[[quota]]\ngpu = "A100-40"\nwhere = "us-central1"\ngpus_max = 2\n'
    limited = run(tmp_path, cluster=CLUSTER_FILE + quota)
    assert limited.exit_code == 2
    assert "[[quota]]: is not kept where several jobs share a cluster" in limited.stderr
    assert '--weights: is "1"; give 2 numbers' in run(tmp_path, "--weights", "1").stderr
