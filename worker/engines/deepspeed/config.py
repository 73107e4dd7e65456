"""DeepSpeed's configuration: the user's, completed from the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from simulator.documents.files import load_document
from simulator.documents.problems import InputError, Problem, nearest
from simulator.spec.job import Job
from simulator.spec.plan import Plan

_LEFT_OPEN = "auto"
"""Marks settings that are to be filled in."""
_NEVER_CLIPPED = 1e30
"""A limit that is never reached: DeepSpeed reports the norm only if it may have to clip."""

# Names that deepspeed 0.19 knows; it accepts torch's optimizers as well.
_OPTIMIZERS = ("Adagrad", "Adam", "AdamW", "Lamb", "Lion", "MuAdam", "MuAdamW", "Muon", "MuSGD")
_SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


class DeepSpeedConfigError(Exception):
    """DeepSpeed rejects the configuration; the message quotes it."""


def read_config(path: Path | None, plan: Plan, job: Job) -> dict[str, Any]:
    """Return DeepSpeed's configuration: the user's settings, and the job's for the others."""
    given = {} if path is None else load_document(path).data
    batch = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": plan.size_of(plan.pipelines[0]),
        "gradient_accumulation_steps": plan.pipelines[0].micro_batches,
    }
    found = [*_contradictions(given, batch, job)]
    if found:
        raise InputError([Problem(str(path), what, cure) for what, cure in found])
    defaults: dict[str, Any] = {
        **batch,
        "steps_per_print": 10**9,
        # Without ZeRO, DeepSpeed's fp16 state cannot be assigned to parameters.
        "zero_optimization": {"stage": 1 if job.precision == "fp16" else job.zero},
        "gradient_clipping": job.clip_norm or _NEVER_CLIPPED,
        "optimizer": optimizer_of(job),
    }
    if job.precision != "fp32":
        defaults[job.precision] = {"enabled": True}
    named = given.get("optimizer", {}).get("type", _LEFT_OPEN)
    if named not in (_LEFT_OPEN, defaults["optimizer"]["type"]):
        del defaults["optimizer"]  # Its parameters do not fit another optimizer.
    return _fill_in(given, defaults)


def optimizer_of(job: Job) -> dict[str, Any]:
    """Return the job's optimizer by DeepSpeed's name: torch's, which needs no compiler."""
    rate = {"lr": job.learning_rate}
    decay = job.update.decay(job.optimizer)
    if job.optimizer == "sgd":
        # torch refuses Nesterov momentum without momentum, where it changes nothing.
        nesterov = job.update.nesterov and job.update.momentum > 0
        momentum = {"momentum": job.update.momentum, "nesterov": nesterov}
        return {"type": "SGD", "params": {**rate, **momentum, "weight_decay": decay}}
    adam = {**rate, "betas": list(job.update.betas), "eps": job.update.epsilon, "torch_adam": True}
    params = {**adam, "weight_decay": decay, "adam_w_mode": job.optimizer == "adamw"}
    return {"type": "AdamW" if job.optimizer == "adamw" else "Adam", "params": params}


def _contradictions(
    given: Mapping[str, Any], batch: Mapping[str, int], job: Job
) -> Iterator[tuple[str, str]]:
    """Yield each contradiction between the configuration and the plan or the job, with a cure."""
    for key, value in batch.items():
        if given.get(key, _LEFT_OPEN) not in (_LEFT_OPEN, value):
            yield f"{key} is {given[key]!r}, but the plan says {value}", "leave it out"
    parts = {}
    for key in ("zero_optimization", "fp16", "bf16", "optimizer"):
        parts[key] = given.get(key, {})
        if not isinstance(parts[key], dict):
            yield f"{key} is {parts[key]!r}", "it must be an object"
            parts[key] = {}
    yield from _unknown_names(given)
    clip = given.get("gradient_clipping", _LEFT_OPEN)
    if clip not in (_LEFT_OPEN, job.clip_norm or 0, job.clip_norm or 0.0):
        expected = "no clip_norm" if job.clip_norm is None else f"clip_norm = {job.clip_norm:g}"
        yield f"gradient_clipping is {clip!r}, but the job has {expected}", "make them agree"
    stage = parts["zero_optimization"].get("stage", _LEFT_OPEN)
    if stage not in (_LEFT_OPEN, job.zero, 1):
        what = f"zero_optimization.stage is {stage!r}, but the job's zero is {job.zero}"
        yield what, "make them the same" if stage == 0 else "pipelines go with 0 or 1"
    for name in ("fp16", "bf16"):
        enabled = parts[name].get("enabled", _LEFT_OPEN)
        if enabled not in (_LEFT_OPEN, job.precision == name):
            what = f"{name}.enabled is {enabled!r}, but the job's precision is {job.precision}"
            yield what, "make them agree"


def _unknown_names(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield unknown optimizers and schedulers; DeepSpeed would report them late, on every rank."""
    for key, known in (("optimizer", _OPTIMIZERS), ("scheduler", _SCHEDULERS)):
        part = given.get(key, {})
        name = part.get("type", _LEFT_OPEN) if isinstance(part, dict) else _LEFT_OPEN
        is_torchs = key == "optimizer" and isinstance(getattr(torch.optim, str(name), None), type)
        is_known = str(name).lower() in {each.lower() for each in known}
        if name != _LEFT_OPEN and not is_known and not is_torchs:
            yield (
                f"{key}.type is {name!r}, which DeepSpeed does not have",
                nearest(str(name), known),
            )


def _fill_in(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the given settings over the defaults; "auto" means the default."""
    result = dict(defaults)
    for key, value in given.items():
        default = defaults.get(key, {})
        if isinstance(value, dict) and isinstance(default, dict):
            result[key] = _fill_in(value, default)
        elif value != _LEFT_OPEN:
            result[key] = value
    return result
