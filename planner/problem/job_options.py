"""TP degrees and micro batch sizes that a job allows a plan to use."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.inputs.model_section import model_tp_problem
from simulator.spec.job import Job
from simulator.spec.plan import Recompute

MICRO_BATCH_MAX = 64
"""Largest micro batch that is tried where the job names none."""


def tp_degrees(job: Job) -> tuple[int, ...]:
    """The TP degrees that divide the model's dimensions, up to the job's ``max_tp``."""
    return tuple(tp for tp in range(1, job.max_tp + 1) if model_tp_problem(job.model, tp) is None)


def recompute_choices(job: Job) -> tuple[Recompute, ...]:
    """The recomputation choices that the job allows."""
    return ("none", "full") if job.recompute == "auto" else (job.recompute,)


def micro_batch_sizes(job: Job) -> tuple[int, ...]:
    """The micro batch sizes that divide the global batch: those of the job, or else all."""
    sizes: Sequence[int] = job.micro_batches or range(1, MICRO_BATCH_MAX + 1)
    return tuple(b for b in sizes if job.global_batch % b == 0)
