"""TP degrees and micro batch sizes that a job allows a plan to use."""

from __future__ import annotations

from simulator.inputs.plan_check import shares_tokens, tp_problem
from simulator.models.layers import Recompute, divisors
from simulator.spec.job import Job


def tp_degrees(job: Job) -> tuple[int, ...]:
    """The TP degrees that divide the model's dimensions and the job's ``max_tp``."""
    return tuple(tp for tp in range(1, job.max_tp + 1) if tp_problem(tp, job) is None)


def token_sharing_degrees(job: Job) -> tuple[int, ...]:
    """The TP degrees that sequence parallelism allows; none above 1 if the model rules it out."""
    if not shares_tokens(job.model):
        return (1,)
    return tuple(tp for tp in tp_degrees(job) if job.sequence % tp == 0)


def recompute_choices(job: Job) -> tuple[Recompute, ...]:
    """The choices that the job allows to planners that recompute all layers or none."""
    return ("none", "full") if job.recompute == "auto" else (job.recompute,)


def micro_batch_sizes(job: Job) -> tuple[int, ...]:
    """The micro batch sizes that divide the global batch: those of the job, or else all."""
    if job.micro_batches:
        return tuple(sorted(b for b in job.micro_batches if job.global_batch % b == 0))
    return divisors(job.global_batch)
