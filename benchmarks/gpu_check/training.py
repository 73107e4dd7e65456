"""Steps of the runtime: against a plain PyTorch loop, the simulator, and other settings."""

from __future__ import annotations

import gc
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.gpu_check.model import llama_job, plan_for, trainer_for
from benchmarks.gpu_check.setting import ZONE, Setting, attempt, finish
from simulator.api import estimator, load_measurements
from simulator.cluster.cluster_file import load_cluster
from simulator.hardware.catalogue import load_catalogue
from simulator.spec.job import Job
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
    found["runtime"] = ours = attempt(lambda: _ours(setting, place, job))
    found["plain_loop"] = plain = attempt(lambda: _plain(setting, place, job))
    found["predicted"] = attempt(lambda: _predicted(setting, job, None))
    if isinstance(ours, dict) and isinstance(plain, dict):
        found["runtime_over_plain_loop"] = ours["step_s"] / plain["step_s"]
    found["switches_step_s"] = _switches(setting, place)
    found["profile"] = attempt(lambda: _profile(setting, job))
    found["predicted_from_profile"] = attempt(lambda: _predicted(setting, job, setting.out))
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
    return found


def _ours(
    setting: Setting, place: torch.device, job: Job, tf32: str = "high", **options: Any
) -> dict[str, Any]:
    _free(place)
    begin_s = time.perf_counter()
    trainer = trainer_for(setting, job, **options)
    finish(place)
    built_s = time.perf_counter() - begin_s
    torch.set_float32_matmul_precision(tf32)  # After the runtime's own choice.
    seconds, losses, report = [], [], None
    for number in range(2 + setting.rounds):
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


def _plain(setting: Setting, place: torch.device, job: Job) -> dict[str, Any]:
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
            loss.backward()
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
            return float(_ours(setting, place, job, tf32, fuses_update=fuses)["step_s"])

        found[name] = attempt(steps)

    is_gpu = place.type == "cuda"
    measure("bf16, flash attention, fused optimizer", fuses=is_gpu)
    measure("bf16, attention by single operations", fuses=is_gpu, flash_attention=False)
    measure("bf16, exact optimizer", fuses=False)
    measure("fp32 as TF32", precision="fp32", fuses=is_gpu)
    measure("fp32", tf32="highest", precision="fp32", fuses=is_gpu)
    torch.set_float32_matmul_precision("high")
    return found


def _predicted(setting: Setting, job: Job, profiles: Path | None) -> dict[str, Any]:
    kind, is_known = setting.kind()
    catalogue = load_catalogue()
    text = f'[[pool]]\nzone = "{ZONE}"\ngpu = "{kind}"\ngpus_per_machine = 1\ngpus = 1\n'
    path = setting.out / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    cluster = load_cluster(path)
    measured = load_measurements(profiles, catalogue=catalogue)
    pool = cluster.pools[0]
    plan = plan_for(setting, job)
    gpu, machine, zone = pool.key
    stage = plan.pipelines[0].stages[0]
    place = type(stage.places[0])(gpu, machine, zone)
    stage = type(stage)(stage.layers, 1, (place,))
    plan = type(plan)(
        plan.micro_batch_size, (type(plan.pipelines[0])(plan.pipelines[0].micro_batches, (stage,)),)
    )
    found = estimator("event", job=job, cluster=cluster, measurements=measured).estimate(plan)
    return {
        "kind": kind if is_known else f"{kind}, which this device is not",
        "step_s": found.iteration_s,
        "peak_memory_gib": found.memory[0][0].total / 2**30,
        "relative_error": found.provenance.relative_error,
    }


def _profile(setting: Setting, job: Job) -> dict[str, Any]:
    """Measure the job's distinct layers, for the planner; needs safetensors."""
    import json  # noqa: PLC0415 - beside what it is for

    from simulator.layer_costs.profile import profile_name  # noqa: PLC0415 - the same
    from simulator.layer_costs.profile_file import profile_to_json  # noqa: PLC0415 - the same
    from worker.layer_profiles.device import open_device  # noqa: PLC0415 - needs safetensors
    from worker.layer_profiles.profile_job import Request, profile_job  # noqa: PLC0415 - the same

    kind, _ = setting.kind()
    device = open_device(setting.device, kind, load_catalogue())
    name = profile_name(job.model.name)
    budget_s = 2.0 if setting.is_quick else 60.0
    sizes = (1, 2) if setting.is_quick else (1, 2, 4)
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    request = Request((1,), sizes, budget_s, name, today)

    class Quiet:
        def sampling(self, what: str, samples: int) -> None: ...
        def finished(self, what: str, figures: Any) -> None: ...
        def ended(self, what: str, why: str) -> None: ...

    profile = profile_job(job, None, request, device, Quiet(), now=time.monotonic)
    path = setting.out / f"profiles_{name}.json"
    path.write_text(json.dumps(profile_to_json(profile), indent=1) + "\n", encoding="utf-8")
    spread = max(timing.relative_error for timing in profile.timings.values())
    return {"file": path.name, "micro_batches": list(sizes), "spread": spread}
