"""How much of the GPUs' peak a step uses: model FLOPs utilization (MFU)."""

from __future__ import annotations

import torch

from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from simulator.spec.job import Job
from simulator.spec.plan import Plan

ANY_GPU = "any"
"""The GPU kind of a plan that names none."""


def seconds_at_peak(job: Job, plan: Plan, device: torch.device) -> float | None:
    """Return how long a step would take at the peak of the plan's GPUs.

    ``None`` if the peak of one of them at the job's precision is not known, as on CPUs.
    """
    if device.type != "cuda":
        return None
    peak = peak_flops(plan, job.precision, own=torch.cuda.get_device_name(device))
    return None if peak is None else model_flops(job) / peak


def model_flops(job: Job) -> float:
    """Return the FLOPs of a step's forward and backward passes, without recomputation."""
    total, sequence = 0.0, job.model.tokens_of(job.sequence)
    for layer in job.model.layers:
        forward = layer.forward_flops(micro_batch=job.global_batch, sequence=sequence)
        total += forward * (1 + layer.backward_over_forward())
    return total


def peak_flops(plan: Plan, precision: str, *, own: str) -> float | None:
    """Return the sum of the peaks of a plan's GPUs, if all kinds are known.

    ``own`` is the driver's name of this rank's GPU. A plan that was made for other kinds says
    nothing of those that it runs on.
    """
    kinds = [
        place.gpu
        for pipeline in plan.pipelines
        for stage in plan.owning_stages(pipeline)
        for place in stage.places
        for _ in range(stage.tp)
    ]
    if set(kinds) == {ANY_GPU}:
        kinds = [own] * len(kinds)
    try:
        gpus = [load_catalogue().gpu(kind) for kind in kinds]
        known = {gpu.name for gpu in gpus}
        if load_catalogue().gpu(own).name not in known:
            return None
    except InputError:
        return None
    peaks = [gpu.peak_flops.get(precision) for gpu in gpus]
    return sum(peak for peak in peaks if peak is not None) if None not in peaks else None
