"""Steps that were measured on one H100 (docs/gpu.md) are predicted from the data sheet alone."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.gpu_check.estimates import predicted
from benchmarks.gpu_check.predictions import RUNS
from benchmarks.gpu_check.setting import Setting

MEASURED_S = {
    "gpt2-medium": 0.1313,
    "gpt2-medium, fp16": 0.1480,
    "gpt2-medium, micro batches of 1": 0.5576,
    "opt, 12 blocks of 1.3b": 0.1746,
    "opt, 12 blocks of 1.3b, fp32": 0.2635,
    "gpt-neo, 12 blocks of 1.3b": 0.1114,
    "llama, 4 blocks of 7b": 0.4280,
    "llama, 4 blocks of 7b, recomputed": 0.5370,
    "llama, 4 blocks of 7b, sequence 16384": 0.5042,
    "llama, 2 blocks of 70b": 0.4239,
    "llama-1b, 8 blocks, attention by single operations": 0.2158,
    "llama, small": 0.1080,
}
"""By run. The ViT is left out: its step waited for its images."""


def test_steps_on_an_h100_are_inside_their_error_bars(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Setting, "kind", lambda _: ("H100-80", True))
    setting = Setting("cuda", False, tmp_path)
    errors = {}
    for name, measured_s in MEASURED_S.items():
        job = RUNS[name].job(name)
        found = predicted(setting, job, RUNS[name].plan(setting, job), None)
        errors[name] = abs(found["step_s"] / measured_s - 1)
        assert errors[name] <= found["relative_error"], name
    assert statistics.fmean(errors.values()) <= 0.08
