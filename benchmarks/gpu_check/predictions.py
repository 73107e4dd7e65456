"""Steps of models of many shapes on one device, and what the simulator expected of each.

The simulator has seen none of these runs. Without measurements it computes them from the device's
data sheet; with a profile it adds up layers that were measured one by one.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.estimates import measured_profile, predicted
from benchmarks.gpu_check.model import plan_for
from benchmarks.gpu_check.setting import Setting, attempt
from benchmarks.gpu_check.training import measured_steps
from simulator.models.families import build_model
from simulator.models.layers import Recompute
from simulator.spec.job import Job
from simulator.spec.plan import Plan

ROUNDS = 5
PROFILE_S = 4.0


@dataclass(frozen=True)
class TrainingRun:
    """One model and how it is trained."""

    family: str
    numbers: Mapping[str, Any]
    batch: int
    micro_batch: int
    precision: Any = "bf16"
    recompute: Recompute = "none"
    others: Mapping[str, Any] = field(default_factory=dict)

    def job(self, name: str) -> Job:
        """Return the job."""
        model = build_model(self.family, name=name, **self.numbers)
        return Job(
            name,
            model,
            global_batch=self.batch,
            sequence=model.sequence_max,
            precision=self.precision,
            optimizer="adamw",
            clip_norm=1.0,
            learning_rate=1e-5,
            **self.others,
        )

    def plan(self, setting: Setting, job: Job) -> Plan:
        """Return the plan of one rank."""
        plan = plan_for(setting, job, micro_batch=self.micro_batch)
        (pipeline,) = plan.pipelines
        (stage,) = pipeline.stages
        stage = replace(stage, recompute=self.recompute)
        return replace(plan, pipelines=(replace(pipeline, stages=(stage,)),))


def _sizes(layers: int, hidden: int, heads: int, **more: int) -> dict[str, int]:
    return {"layers": layers, "hidden": hidden, "heads": heads, **more}


_MEDIUM = _sizes(24, 1024, 16)
_WIDE = _sizes(12, 2048, 32, sequence=2048)
_7B = _sizes(4, 4096, 32, ffn=11008, sequence=4096)
_1B = _sizes(8, 2048, 16, kv_heads=8, ffn=5632, sequence=2048)
RUNS: dict[str, TrainingRun] = {
    "gpt2-medium": TrainingRun("gpt2", _MEDIUM, 16, 8),
    "gpt2-medium, fp16": TrainingRun("gpt2", _MEDIUM, 16, 8, "fp16"),
    "gpt2-medium, micro batches of 1": TrainingRun("gpt2", _MEDIUM, 8, 1),
    "opt, 12 blocks of 1.3b": TrainingRun("opt", _WIDE, 8, 4),
    "opt, 12 blocks of 1.3b, fp32": TrainingRun("opt", _WIDE, 4, 2, "fp32"),
    "gpt-neo, 12 blocks of 1.3b": TrainingRun("gpt-neo", _WIDE, 4, 2),
    "llama, 4 blocks of 7b": TrainingRun("llama", _7B, 8, 2),
    "llama, 4 blocks of 7b, recomputed": TrainingRun("llama", _7B, 8, 2, recompute="full"),
    "llama, 4 blocks of 7b, sequence 16384": TrainingRun("llama", {**_7B, "sequence": 16384}, 2, 1),
    "llama, 2 blocks of 70b": TrainingRun(
        "llama", _sizes(2, 8192, 64, kv_heads=8, ffn=28672, sequence=4096), 4, 1
    ),
    "llama-1b, 8 blocks, attention by single operations": TrainingRun(
        "llama", _1B, 8, 2, others={"flash_attention": False}
    ),
    "llama, small": TrainingRun("llama", _sizes(8, 512, 8, ffn=1408, sequence=512), 32, 8),
    "vit-large": TrainingRun("vit", _sizes(24, 1024, 16, image=224, patch=16), 128, 64),
}
QUICK: dict[str, TrainingRun] = {
    "gpt2": TrainingRun("gpt2", _sizes(2, 32, 4, vocab=64, sequence=16), 4, 2),
    "vit": TrainingRun(
        "vit", _sizes(2, 32, 4, image=32, patch=16, classes=8), 4, 2, recompute="full"
    ),
}


def run(setting: Setting) -> dict[str, Any]:
    """Measure and predict each run; sum up the errors."""
    folder = setting.out / "profiles-of-predictions"
    folder.mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    totals: dict[str, Any] = {}
    for name, training in (QUICK if setting.is_quick else RUNS).items():
        found[name] = attempt(partial(_compare, setting, name, training, folder))
        print(name, found[name], flush=True)
    for key in ("without_a_profile", "with_a_profile"):
        rows = [each[key] for each in found.values() if isinstance(each, dict)]
        errors = [row["error_pct"] for row in rows if isinstance(row, dict)]
        inside = [row["is_inside"] for row in rows if isinstance(row, dict)]
        if errors:
            totals[f"all, {key}"] = {
                "mean_abs_pct": statistics.fmean(map(abs, errors)),
                "max_abs_pct": max(map(abs, errors)),
                "inside_the_error_bar": f"{sum(inside)} of {len(inside)}",
            }
    return totals | found


def _compare(setting: Setting, name: str, training: TrainingRun, folder: Path) -> dict[str, Any]:
    job = training.job(name)
    plan = training.plan(setting, job)
    measured = measured_steps(setting, setting.place, job, plan, rounds=ROUNDS)
    budget_s = 1.0 if setting.is_quick else PROFILE_S
    profile = attempt(
        lambda: measured_profile(setting, job, (training.micro_batch,), folder, budget_s)
    )
    found = {
        "step_s": measured["step_s"],
        "mfu": measured["mfu"],
        "device_gib": measured.get("device_gib"),
        "without_a_profile": _error(predicted(setting, job, plan, None), measured),
        "with_a_profile": profile,
    }
    if isinstance(profile, dict):
        found["with_a_profile"] = _error(predicted(setting, job, plan, folder), measured)
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    return found


def _error(expected: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    error = expected["step_s"] / measured["step_s"] - 1
    return {
        "predicted_s": expected["step_s"],
        "error_pct": 100 * error,
        "bar_pct": 100 * expected["relative_error"],
        "is_inside": abs(error) <= expected["relative_error"],
        "peak_memory_gib": expected["peak_memory_gib"],
    }
