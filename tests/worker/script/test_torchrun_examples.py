"""The scripts of examples/torchrun run, and their versions for Sailor survive lost nodes."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

for needed in ("accelerate", "datasets", "peft", "transformers"):
    pytest.importorskip(needed)

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "torchrun"
ARGUMENTS = {
    "ddp": ["--tokens", "{}/tokens.npy", "--epochs", "3"],
    "fsdp2": ["--model", "{}/llama", "--tokens", "{}/tokens.npy", "--steps", "30"],
    "lora": ["--model", "{}/llama", "--notes", "{}/notes.jsonl", "--epochs", "2", "--save", "{}/l"],
    "accelerated": ["--model", "{}/llama", "--notes", "{}/notes.jsonl", "--epochs", "2"],
    "vit": ["--images", "{}/shapes.npz", "--epochs", "3"],
}
WRITTEN_MAX = 10
QUICK = "ddp"
RUNS = [
    name if name == QUICK else pytest.param(name, marks=pytest.mark.at_length) for name in ARGUMENTS
]


def lines(name):
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_at_most_ten_lines_are_written_to_come_from_torchrun(name):
    found = difflib.ndiff(lines(name), lines(f"{name}_sailor"))
    changed = [line for line in found if line[0] in "+-" and line[2:].strip()]
    written = sum(line[0] == "+" for line in changed)
    assert written <= WRITTEN_MAX
    table = (ROOT / "docs" / "from-torchrun.md").read_text(encoding="utf-8")
    row = next(line for line in table.splitlines() if line.startswith(f"| [`{name}.py`]"))
    assert row.endswith(f"| {written} | {len(changed) - written} |")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    run([sys.executable, FOLDER / "prepare.py", folder])
    return folder


def run(words):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(word) for word in words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def arguments(name, data):
    return [word.format(data) for word in ARGUMENTS[name]]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_script_runs_under_torchrun(name, data):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run([*torchrun, "--nproc-per-node", "2", FOLDER / f"{name}.py", *arguments(name, data)])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == QUICK else pytest.mark.at_length)
        for name in ARGUMENTS
    ],
)
def test_its_version_for_sailor_survives_two_lost_nodes_exactly(name, data):
    kills = [sys.executable, "-m", "tests.chaos.script_kills", "--kills", "2", "--exact"]
    told = run([*kills, FOLDER / f"{name}_sailor.py", "--", *arguments(name, data)])
    found = json.loads(told.splitlines()[-1])
    assert (found["steps_missing"], found["wrong_samples"]) == (0, 0)
    assert found["loss_error"] < 1e-6
