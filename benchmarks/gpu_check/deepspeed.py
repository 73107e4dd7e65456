"""The same job by our engine and by DeepSpeed's, each as ``worker run`` trains it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.setting import Setting, attempt

JOB = """
[model]
family = "llama"
layers = {layers}
hidden = {hidden}
heads = {heads}
ffn = {ffn}
vocab = {vocab}
sequence = {sequence}

[training]
global_batch = 8
sequence = {sequence}
precision = "{precision}"
zero = {zero}
micro_batches = [2]
"""
STEPS, WARM = 8, 3
LIMIT_S = 60.0
"""DeepSpeed compiles its fused optimizer at first use."""


def run(setting: Setting) -> dict[str, Any]:
    """Train with each engine; compare losses and times."""
    found: dict[str, Any] = {}
    cases = {"bf16": ("bf16", 0), "bf16, ZeRO-1": ("bf16", 1)}
    for name, (precision, zero) in cases.items():
        ours = attempt(partial(_train, setting, "sailor", precision, zero))
        theirs = attempt(partial(_train, setting, "deepspeed", precision, zero))
        found[name] = {"sailor": ours, "deepspeed": theirs}
        if isinstance(ours, dict) and isinstance(theirs, dict):
            pairs = zip(ours["losses"], theirs["losses"], strict=True)
            found[name]["losses differ by at most"] = max(abs(a - b) / abs(a) for a, b in pairs)
            found[name]["sailor over deepspeed"] = ours["step_s"] / theirs["step_s"]
    return found


def _train(setting: Setting, engine: str, precision: str, zero: int) -> dict[str, Any]:
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 64, "sequence": 16}
    if not setting.is_quick:
        sizes = {"layers": 8, "hidden": 2048, "heads": 16, "ffn": 5632, "vocab": 32000}
        sizes["sequence"] = 2048
    path = setting.out / "deepspeed.toml"
    path.write_text(JOB.format(precision=precision, zero=zero, **sizes), encoding="utf-8")
    words = ["run", "--job", str(path), "--steps", str(STEPS), "--engine", engine, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "worker", *words, "--device", setting.device],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "MASTER_ADDR": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(engine, precision, zero, done.stdout[-3000:], done.stderr[-3000:], flush=True)
    if done.returncode:
        why = next(
            (line for line in reversed(done.stderr.splitlines()) if line.strip()), "no output"
        )
        raise RuntimeError(f"ended with {done.returncode}: {why}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    steps = [line for line in lines if "loss" in line]
    return {
        "step_s": statistics.median(line["seconds"] for line in steps[WARM:]),
        "losses": [line["loss"] for line in steps],
        "peak_memory_gib": max(
            rank["peak_memory_bytes"]
            for line in done.stderr.splitlines()
            if line.startswith('{"ranks"')
            for rank in json.loads(line)["ranks"]
        )
        / 2**30,
    }
