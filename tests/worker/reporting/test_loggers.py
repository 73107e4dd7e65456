"""What each logger wrote, read back as its own tools read it."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import sailor
from tests.worker.warm import ROOT
from worker.reporting import loggers
from worker.script.recipe import Recipe

SCRIPT = """
import torch
from torch import nn
import sailor

torch.manual_seed(0)
data = [(torch.sin(torch.arange(4.0) * i), i % 3) for i in range(12)]
data[4] = (torch.full((4,), float("nan")), 0)
sailor.Trainer(
    nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
    data,
    batch_size=4,
    steps=3,
    shuffle=False,
    eval_dataset=data[:4],
    loggers=[LOGGER, sailor.JsonLines("lines.jsonl")],
).train()
"""


PLAN = {
    "micro_batch_size": 1,
    "pipelines": [
        {
            "micro_batches": 2,
            "stages": [{"layers": [0, 5], "tp": 1, "gpu": "A100-40", "machine": "m", "zone": "z"}],
        }
    ]
    * 2,
}


def run(folder: Path, logger: str, *words: str, **environment: str) -> list[dict[str, float]]:
    """Train by a script that has a logger, and return its JSON lines to compare."""
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("LOGGER", logger))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, *words, script],
        cwd=folder, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "is not used any more" not in done.stdout, done.stdout
    lines = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 2]
    assert lines[1]["loss"] is None
    assert [line["skipped_steps"] for line in lines[:3]] == [0, 1, 1]
    return lines


def test_logger_that_hangs_or_fails_at_the_end_delays_no_other(monkeypatch, capsys):
    closed, never = [], threading.Event()

    class Kept:
        def __init__(self, end: Callable[[], object]) -> None:
            self.close = end

        def log(self, step: int, values: Mapping[str, float]) -> None:
            """Only its end matters."""

    monkeypatch.setattr(loggers, "CLOSE_S", 0.05)
    fails = Kept(lambda: 1 / 0)
    loggers.close_all(
        [Kept(never.wait), fails, Kept(lambda: closed.append(1)), sailor.JsonLines("x")]
    )
    never.set()
    assert closed == [1]
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "Kept was not closed within 0 s",
        "Kept was not closed: ZeroDivisionError: division by zero",
    ]


def test_logger_that_fails_is_not_used_again_and_says_why_in_a_line(capsys):
    class Fails:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            if step == 1:
                raise OSError("no space left\non the disk")
            figures.append(values["loss"])

    figures: list[float] = []
    given = {"loggers": (Fails(), Fails()), "batch_size": 1, "steps": 1}
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    recipe = Recipe(layers, [(torch.ones(2), 0)], **given)
    assert recipe.cut.blocks, "as training begins"
    assert recipe.report(0, {"loss": 1.0}) == ""
    wanted = "; ".join(["Fails is not used any more: OSError: no space left"] * 2)
    assert [recipe.report(step, {"loss": 1.0}) for step in (1, 2)] == [wanted] * 2
    assert figures == [1.0, 1.0]
    assert capsys.readouterr().out.count("on the disk") == 2


def same(told: list[float], lines: list[dict[str, float]]) -> bool:
    """Return whether these are the losses of three steps."""
    first, second, third = told
    wanted = lines[0]["loss"], lines[2]["loss"]
    return (first, third) == pytest.approx(wanted) and math.isnan(second)


@pytest.mark.slow
def test_tensorboard_reads_its_events(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    lines = run(tmp_path, 'sailor.TensorBoard("board")')
    found = events.EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    assert same([event.value for event in found.Scalars("loss")], lines)
    (evaluated,) = found.Scalars("eval/loss")
    assert (evaluated.step, evaluated.value) == (2, pytest.approx(lines[3]["eval/loss"]))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_mlflow_reads_its_run(ranks, tmp_path, monkeypatch):
    """Also where ranks run in processes of their own, which end without ``atexit``."""
    mlflow = pytest.importorskip("mlflow")
    kept = {
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/runs",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    words = ("-m", "worker", "run", "--plan", "plan.json", "--job") * (ranks == 2)
    lines = run(tmp_path, 'sailor.MLflow(run_name="mine")', *words, **kept)
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    client = mlflow.MlflowClient(kept["MLFLOW_TRACKING_URI"])
    (found,) = client.search_runs(["0"])
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    told = client.get_metric_history(found.info.run_id, "loss")
    assert same([metric.value for metric in sorted(told, key=lambda m: m.step)], lines)
    assert found.data.metrics["eval/loss"] == pytest.approx(lines[3]["eval/loss"])


@pytest.mark.slow
def test_weights_and_biases_keeps_an_offline_run(tmp_path):
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    settings = 'mode="offline", project="small", id="one", dir="."'
    lines = run(tmp_path, f"sailor.WandB({settings})", WANDB_SILENT="true")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-one.wandb")
    rows = []
    for record in _records(file.read_bytes(), messages):
        if record.WhichOneof("record_type") == "history":
            named = {item.nested_key[0]: item.value_json for item in record.history.item}
            rows.append({name: json.loads(value) for name, value in named.items()})
    assert [row["_step"] for row in rows] == [0, 1, 2]
    assert same([float(row["loss"]) for row in rows], lines)
    assert rows[2]["eval/loss"] == pytest.approx(lines[3]["eval/loss"])


def _records(data: bytes, messages):
    """Read a log of Weights & Biases, whose records are shorter than a block of LevelDB here."""
    place = 7
    while place < len(data):
        _, length, kind = struct.unpack_from("<IHB", data, place)
        assert kind == 1, "a record is cut"
        yield messages.Record.FromString(data[place + 7 : place + 7 + length])
        place += 7 + length


def test_json_lines_have_no_number_that_json_lacks(tmp_path):
    sailor.JsonLines(tmp_path / "a" / "lines").log(3, {"loss": math.inf, "rate": 0.5})
    assert (tmp_path / "a" / "lines").read_text() == '{"step": 3, "loss": null, "rate": 0.5}\n'
