"""Selects the engine that trains a plan: the job's own if it can, else the sailor engine.

Every rank, and the planner, computes the same answer from the job and the plan. It needs neither
torch nor DeepSpeed.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.documents.problems import Problem
from simulator.spec.job import Engine, Job
from simulator.spec.plan import Plan


def engine_for(job: Job, plan: Plan) -> tuple[Engine, str]:
    """Return the engine, with a reason if it is not the job's."""
    found = deepspeed_problems(plan, job, place="plan") if job.engine == "deepspeed" else []
    if not found:
        return job.engine, ""
    why = "; ".join(problem.what for problem in found)
    return "sailor", f"the sailor engine trains this plan, which DeepSpeed cannot: {why}"


def snapshot_job(job: Job, plan: Plan) -> Job:
    """Return the job as its snapshots see it: under DeepSpeed each rank exports all moments."""
    return replace(job, zero=0) if engine_for(job, plan)[0] == "deepspeed" else job


def deepspeed_problems(plan: Plan, job: Job, *, place: str) -> list[Problem]:
    """List what DeepSpeed's engine does not support in a plan or a job."""
    found = []
    first = plan.pipelines[0]
    shape = (first.micro_batches, [stage.layers for stage in first.stages])
    for number, pipeline in enumerate(plan.pipelines[1:], start=1):
        what = _difference(shape, (pipeline.micro_batches, [s.layers for s in pipeline.stages]))
        if what is not None:
            what_differs = f"its pipelines differ: pipeline {number} has {what}"
            found.append(Problem(place, what_differs, "the sailor engine trains it"))
            break
    if len(plan.sizes) > 1:
        what = f"has micro batches of {' and '.join(map(str, plan.sizes))} samples"
        found.append(Problem(place, what, "the sailor engine trains it"))
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    if any(stage.tp > 1 for stage in stages):
        found.append(Problem(place, "has TP degrees above 1", "the sailor engine trains it"))
    if any(stage.recompute != "none" for stage in stages):
        found.append(Problem(place, "recomputes activations", "the sailor engine supports it"))
    if plan.schedule != "1f1b":
        found.append(Problem(place, f"has the schedule {plan.schedule}", "DeepSpeed's is 1f1b"))
    if job.model.family == "module":
        what = "is a module of its own code, which the sailor engine cuts"
        found.append(Problem("[model]", what, "the sailor engine trains it"))
    if job.model.family == "exact":
        found.append(Problem("[model] family", "is exact, which DeepSpeed's sums are not"))
    return found


_PipelineShape = tuple[int, list[tuple[int, int]]]


def _difference(first: _PipelineShape, other: _PipelineShape) -> str | None:
    if first[0] != other[0]:
        return f"{other[0]} micro batches and pipeline 0 has {first[0]}"
    if first[1] != other[1]:
        return "other stages than pipeline 0"
    return None
