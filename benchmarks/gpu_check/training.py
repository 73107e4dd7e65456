"""Steps of the runtime: against a plain PyTorch loop, the simulator, and other settings."""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.gpu_check.estimates import measured_profile, predicted
from benchmarks.gpu_check.model import llama_job, plan_for, trainer_for
from benchmarks.gpu_check.setting import Setting, attempt, finish
from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.data.sources.open_data import open_data
from worker.models.apply_plan import build_layers
from worker.models.random_numbers.microbatch_context import MicroBatch, MicroBatchContext
from worker.training.utilization import model_flops


def run(setting: Setting) -> dict[str, Any]:
    """Measure steps, then compare."""
    place, job = setting.place, llama_job(setting)
    found: dict[str, Any] = {
        "model": {
            "layers": len(job.model.layers),
            "parameters": sum(layer.parameters(1) for layer in job.model.layers),
            "sequence": job.sequence,
            "global_batch": job.global_batch,
        }
    }
    plan = plan_for(setting, job)
    found["runtime"] = ours = attempt(lambda: measured_steps(setting, place, job, plan))
    found["plain_loop"] = plain = attempt(lambda: _train_plain(setting, place, job))
    found["predicted"] = attempt(lambda: predicted(setting, job, plan, None))
    if isinstance(ours, dict) and isinstance(plain, dict):
        found["runtime_over_plain_loop"] = ours["step_s"] / plain["step_s"]
    found["switches_step_s"] = _switches(setting, place)
    sizes, budget_s = ((1, 2), 2.0) if setting.is_quick else ((1, 2, 4), 60.0)
    found["profile"] = attempt(lambda: measured_profile(setting, job, sizes, setting.out, budget_s))
    found["predicted_from_profile"] = attempt(lambda: predicted(setting, job, plan, setting.out))
    for name in ("predicted", "predicted_from_profile"):
        if isinstance(ours, dict) and isinstance(found[name], dict):
            found[name]["over_measured"] = found[name]["step_s"] / ours["step_s"]
    return found


def _free(place: torch.device) -> None:
    gc.collect()
    if place.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(place)


def _figures(
    place: torch.device, job: Job, seconds: list[float], losses: list[float]
) -> dict[str, Any]:
    step_s = statistics.median(seconds)
    found = {
        "step_s": step_s,
        "tokens_per_s": job.global_batch * job.sequence / step_s,
        "model_tflops": model_flops(job) / step_s / 1e12,
        "first_and_last_loss": [losses[0], losses[-1]],
    }
    if place.type == "cuda":
        found["peak_memory_gib"] = torch.cuda.max_memory_allocated(place) / 2**30
        found["reserved_gib"] = torch.cuda.max_memory_reserved(place) / 2**30
        free, total = torch.cuda.mem_get_info(place)
        found["device_gib"] = (total - free) / 2**30  # With context and libraries.
    return found


def measured_steps(
    setting: Setting,
    place: torch.device,
    job: Job,
    plan: Plan,
    tf32: str = "high",
    rounds: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a plan of one rank for some steps."""
    _free(place)
    begin_s = time.perf_counter()
    trainer = trainer_for(setting, job, plan, **options)
    finish(place)
    built_s = time.perf_counter() - begin_s
    torch.set_float32_matmul_precision(tf32)  # After the runtime's own choice.
    seconds, losses, report = [], [], None
    for number in range(2 + (rounds or setting.rounds)):
        finish(place)
        begin_s = time.perf_counter()
        report = trainer.step()
        finish(place)
        losses.append(report.loss)
        seconds += [time.perf_counter() - begin_s] if number >= 2 else []
    assert report is not None
    found = _figures(place, job, seconds, losses)
    mfu = None if report.at_peak_s is None else report.at_peak_s / found["step_s"]
    return {**found, "mfu": mfu, "built_s": built_s}


def _train_plain(setting: Setting, place: torch.device, job: Job) -> dict[str, Any]:
    """The same layers in one loop: autocast, torch's AdamW, no sharing, no snapshots."""
    _free(place)
    context = MicroBatchContext()
    everything = range(len(job.model.layers))
    layers = build_layers(job, everything, context=context, dtype=torch.float32, device=place)
    weights = list({p: None for layer in layers for p in layer.module.parameters()})
    optimizer = torch.optim.AdamW(weights, lr=job.learning_rate, fused=True)
    data, size = open_data(job, Path()), plan_for(setting, job).micro_batch_size
    seconds, losses = [], []
    for step in range(2 + setting.rounds):
        finish(place)
        begin_s = time.perf_counter()
        total = torch.zeros((), device=place)
        for first in range(0, job.global_batch, size):
            positions = range(first, first + size)
            samples = data.batch(step, positions)
            context.current = MicroBatch(0, step, torch.tensor(list(positions)))
            assert samples.labels is not None
            x, labels = samples.inputs.to(place), samples.labels.to(place)
            with torch.autocast(place.type, torch.bfloat16):
                for layer in layers:
                    x = layer.module(x)
                logits = x.flatten(0, -2)[:, : job.model.vocab].float()
                loss = cross_entropy(logits, labels.flatten()) * size / job.global_batch
            torch.autograd.backward(loss)
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
        finish(place)
        seconds += [time.perf_counter() - begin_s] if step >= 2 else []
    return _figures(place, job, seconds, losses)


def _switches(setting: Setting, place: torch.device) -> dict[str, Any]:
    """Step times of a model of four layers with one thing changed."""
    found: dict[str, Any] = {}

    def measure(name: str, tf32: str = "high", fuses: bool | None = None, **changes: Any) -> None:
        def steps() -> float:
            job = llama_job(setting, layers=4, **changes)
            plan = plan_for(setting, job)
            found = measured_steps(setting, place, job, plan, tf32, fuses_update=fuses)
            return float(found["step_s"])

        found[name] = attempt(steps)

    is_gpu = place.type == "cuda"
    measure("bf16, flash attention, fused optimizer", fuses=is_gpu)
    measure("bf16, attention by single operations", fuses=is_gpu, flash_attention=False)
    measure("bf16, exact optimizer", fuses=False)
    measure("fp32 as TF32", precision="fp32", fuses=is_gpu)
    measure("fp32", tf32="highest", precision="fp32", fuses=is_gpu)
    torch.set_float32_matmul_precision("high")
    return found
