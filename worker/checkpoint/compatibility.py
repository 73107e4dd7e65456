"""Whether a job may continue from a checkpoint of another one.

Asked when a job is submitted and again when it is trained; needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulator.documents.problems import Problem, Problems
from simulator.spec.job import OPTIMIZER_MOMENTS, Job
from worker.checkpoint.snapshot_file import fingerprint
from worker.layout.tensor_table import tables_of, tensors_of


def dtype_of(job: Job) -> str:
    """Return the type of the master weights, as in headers: ``float32``."""
    return "float64" if job.model.family == "exact" else "float32"


def model_of(job: Job) -> str:
    """Return the fingerprint of the job's tensors."""
    moments = OPTIMIZER_MOMENTS[job.optimizer]
    return fingerprint(tables_of(job), atoms=job.max_tp, dtype=dtype_of(job), moments=moments)


def differences(job: Job, was: Job, *, step: int, place: str) -> list[Problem]:
    """List the changes of a job since a checkpoint that make it unusable."""
    problems = Problems()
    if model_of(job) != model_of(was):
        what = f"the model was changed since step {step}: {_describe_difference(job, was)}"
        problems.add(place, what, "train the same model, or start a new run")
    now: Any
    before: Any
    if not problems.found and job.optimizer != was.optimizer:
        what = f"it was made with optimizer = {was.optimizer}, and the job has {job.optimizer}"
        cure = f'set optimizer = "{was.optimizer}"; its moments are of no use to another optimizer'
        problems.add(place, what, cure)
    for key in ("global_batch", "sequence"):
        now, before = getattr(job, key), getattr(was, key)
        if now != before:
            what = f"it was made with {key} = {before}, and the job has {now}"
            cure = f"set {key} = {before}; otherwise samples would repeat or be skipped"
            problems.add(place, what, cure)
    for key in ("kind", "seed", "tokens", "images", "labels", "samples"):
        now, before = getattr(job.data, key), getattr(was.data, key)
        both = isinstance(now, str) and isinstance(before, str)
        # Compare files by name only: the folder may differ between machines.
        if now != before and not (both and Path(now).name == Path(before).name):
            what = f"it was made with [data] {key} = {before!r}, and the job has {now!r}"
            problems.add(place, what, "use a checkpoint of this job, with the same data")
    return problems.found


def _describe_difference(job: Job, was: Job) -> str:
    for key in ("max_tp", "optimizer"):
        if getattr(job, key) != getattr(was, key):
            return f"{key} is {getattr(job, key)} and was {getattr(was, key)}"
    if len(job.model.layers) != len(was.model.layers):
        return f"it has {len(job.model.layers)} layers and had {len(was.model.layers)}"
    mine, theirs = _shapes(job), _shapes(was)
    for layer, name in sorted(mine.keys() | theirs.keys()):
        shape, before = mine.get((layer, name)), theirs.get((layer, name))
        if shape != before:
            shown = [each or "not there" for each in (shape, before)]
            return f"{name} of layer {max(layer, 0)} is {shown[0]} and was {shown[1]}"
    return "its tensors are split differently"


def _shapes(job: Job) -> dict[tuple[int, str], tuple[int, ...]]:
    return {
        (layer, spec.name): spec.shape for layer, specs in tensors_of(job).items() for spec in specs
    }
