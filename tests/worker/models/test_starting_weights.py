"""A run starts from a checkpoint, under any plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from simulator.models.description_file import describe
from simulator.models.families import build_model
from tests.worker.small_run import run, write
from tests.worker.warm import Warm

FAMILY = """family = "gpt2"
layers = 2
hidden = 16
heads = 4
vocab = 64
sequence = 8"""


def losses(warm: Warm, folder: Path, *, plan: bool, **env: str) -> list[float]:
    done = run(warm, folder, plan=plan, **env)
    assert done.code == 0, done.err
    return [step["loss"] for step in done.steps]


def refusal(warm: Warm, folder: Path) -> list[str]:
    done = run(warm, folder)
    assert (done.code, done.out) == (2, "")
    return done.err.splitlines()


def write_model(folder: Path, model: str) -> None:
    """Write the small run with these lines for its model."""
    write(folder)
    text = (folder / "job.toml").read_text()
    assert FAMILY in text
    (folder / "job.toml").write_text(text.replace(FAMILY, model))


@pytest.mark.slow
def test_any_plan_starts_from_a_checkpoint(warm: Warm, tmp_path: Path) -> None:
    write(tmp_path)
    fresh = losses(warm, tmp_path, plan=False)
    assert run(warm, tmp_path, "--save", tmp_path / "trained").code == 0
    write_model(tmp_path, f'{FAMILY}\nweights = "trained"')
    alone, many = (losses(warm, tmp_path, plan=plan) for plan in (False, True))
    assert many == pytest.approx(alone, rel=1e-5)
    # After the update on the first batch.
    assert alone[0] < fresh[0] - 0.01


@pytest.mark.slow
def test_checkpoint_problems_are_reported_before_any_rank_starts(
    warm: Warm, tmp_path: Path
) -> None:
    write_model(tmp_path, f'{FAMILY}\nweights = "none"')
    (line,) = refusal(warm, tmp_path)
    assert line.endswith("does not exist; name a safetensors file or its folder")
    write(tmp_path)
    run(warm, tmp_path, "--save", tmp_path / "none", "--steps", "1")
    held = load_file(tmp_path / "none" / "model.safetensors")
    del held["transformer.wpe.weight"], held["transformer.h.0.ln_1.bias"]
    save_file(held, tmp_path / "none" / "model.safetensors")
    write_model(tmp_path, f'{FAMILY}\nweights = "none"')
    assert len(refusal(warm, tmp_path)) == 2


def test_described_model_without_code_is_refused(warm: Warm, tmp_path: Path) -> None:
    write_model(tmp_path, 'description = "model.json"')
    model = build_model("gpt2", name="own", layers=2, hidden=16, heads=4, vocab=64, sequence=8)
    model = replace(model, architecture=None)
    (tmp_path / "model.json").write_text(json.dumps(describe(model)))
    (line,) = refusal(warm, tmp_path)
    assert "own has a description but no code; train it by a script" in line
