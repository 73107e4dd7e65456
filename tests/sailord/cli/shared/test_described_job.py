"""Scripts in the planning commands: described in a worker process, planned like a job file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sailord.cli.main import main
from sailord.cli.shared.described_job import JobFile
from tests.sailord.cli.planning.test_plan import CLUSTER, JOB

SCRIPT = """
import sys
import torch
import sailor

WIDTH = int(open("width").read())
batch = int(sys.argv[1]) if len(sys.argv) > 1 else 8
sailor.Trainer(
    torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))),
    [(torch.zeros(WIDTH), torch.zeros(WIDTH))] * 64,
    loss=lambda out, batch: ((out - batch[1]) ** 2).mean(-1), batch_size=batch, steps=2,
    loggers=[sailor.JsonLines("logs/a.jsonl"), sailor.TensorBoard("/far")],
).train()
"""


def run(folder: Path, command: str, *words: str) -> Result:
    (folder / "width").write_text("8", encoding="utf-8")
    inner = folder / "scripts"
    inner.mkdir(exist_ok=True)
    (inner / "train.py").write_text(SCRIPT, encoding="utf-8")
    (folder / "cluster.toml").write_text(CLUSTER, encoding="utf-8")
    return CliRunner().invoke(main, [command, *words])


@pytest.mark.slow
def test_a_script_is_planned_and_judged_before_it_is_submitted(tmp_path: Path) -> None:
    script, cluster, plan = (
        str(tmp_path / name) for name in ("scripts/train.py", "cluster.toml", "plan.json")
    )
    inside = ("--workdir", str(tmp_path))
    refused = run(tmp_path, "plan", script, cluster)
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: train.py:6: FileNotFoundError: ")
    made = run(tmp_path, "plan", script, cluster, *inside, "--save", plan, "--", "12")
    assert made.exit_code == 0, made.stderr
    assert "12 samples an iteration" in made.stdout
    (throughput,) = (line for line in made.stdout.splitlines() if line.startswith("throughput"))
    assert throughput.endswith(" samples/s"), "no tokens"
    assert "note: planned without tensor parallelism" in made.stderr
    judged = run(tmp_path, "simulate", plan, script, cluster, *inside, "--json", "--", "12")
    assert judged.exit_code == 0, judged.stderr
    assert sum(json.loads(judged.stdout)["gpus_used"].values()) >= 1
    other = run(tmp_path, "simulate", plan, script, cluster, *inside)
    assert other.exit_code == 2
    assert "global batch" in other.stderr
    assert JobFile(Path(script), workdir=tmp_path).described().outputs == ("logs/a.jsonl",)


@pytest.mark.slow
def test_mistakes_of_script_and_cluster_are_reported_together(tmp_path: Path) -> None:
    missing, cluster = str(tmp_path / "none.py"), str(tmp_path / "none.toml")
    told = run(tmp_path, "plan", missing, cluster)
    assert told.exit_code == 2
    assert "none.py: does not exist; name a Python script" in told.stderr
    assert "none.toml: there is no file" in told.stderr


@pytest.mark.parametrize("given", [("--", "--lr"), ("--workdir", ".")])
def test_a_job_file_takes_no_arguments(tmp_path: Path, given: tuple[str, ...]) -> None:
    (tmp_path / "job.toml").write_text(JOB.format(objective="", training=""), encoding="utf-8")
    words = str(tmp_path / "job.toml"), str(tmp_path / "cluster.toml")
    told = run(tmp_path, "plan", *words, *given)
    assert (told.exit_code, told.stderr.count("error: ")) == (2, 1)
    assert "is a job file; only a script takes ARGUMENTS and --workdir" in told.stderr


@pytest.mark.parametrize(
    ("command", "cure"),
    [
        (("submit",), "leave them out, and write what they say into the file"),
        (("checkpoint", "import", "files", "--name", "j", "--job"), "write [checkpoint] into"),
    ],
)
def test_a_job_file_has_no_folder_that_travels(
    tmp_path: Path, command: tuple[str, ...], cure: str
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(objective="", training=""), encoding="utf-8")
    told = CliRunner().invoke(main, [*command, str(job), "--workdir", str(tmp_path)])
    assert (told.exit_code, told.stderr.count("error: ")) == (2, 1)
    assert "only a script takes ARGUMENTS, --workdir" in told.stderr
    assert cure in told.stderr


def test_without_torch_a_script_cannot_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = str(tmp_path / "scripts/train.py"), str(tmp_path / "cluster.toml")
    # Only here: the random numbers that torch draws are seeded again at the test's end.
    with monkeypatch.context() as here:
        here.setitem(sys.modules, "torch", None)
        here.setattr("importlib.util.find_spec", lambda _: None)
        told = run(tmp_path, "plan", *words)
    assert "needs torch, which is not installed here" in told.stderr
