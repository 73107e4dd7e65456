"""The plan of a run that names none: all layers on one device."""

from __future__ import annotations

from simulator.models.layers import Recompute
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage

_MICRO_BATCH_MAX = 8


def one_rank_plan(job: Job) -> Plan:
    """Return a plan with all layers on one device, in small micro batches."""
    fits = (n for n in range(_MICRO_BATCH_MAX, 0, -1) if job.global_batch % n == 0)
    allowed = (n for n in job.micro_batches or () if job.global_batch % n == 0)
    size = next(allowed, None) or next(fits)
    recompute: Recompute = "full" if job.recompute == "full" else "none"
    stage = Stage((0, len(job.model.layers)), 1, (Place("any", "this", "here"),), recompute)
    return Plan(size, (Pipeline(job.global_batch // size, (stage,)),))
