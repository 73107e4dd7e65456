"""Reads a submitted job and derives what its record holds: shape and checkpoint settings."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import Saving
from simulator.documents.files import parse_document
from simulator.documents.problems import InputError, Problem
from simulator.inputs.job_file import job_from_document
from simulator.spec.job import Job

NAMES_OTHERS = ("config", "hf_config", "file", "description")
"""Keys of ``[model]`` that name files. They are refused in submitted jobs, which must not
make sailord read files of its own machine."""


def read_job(spec: str, *, begun: int = 0, usd_max: float | None = None) -> Job:
    """Parse a submitted job; it must be self-contained and name no other file for its model.

    Of one that continues from a checkpoint, its limits in total are for the steps since ``begun``.
    ``usd_max`` is a total budget that was given since.
    """
    document = parse_document(spec.encode(), name="job", flaws_raise=False)
    model = document.data.get("model")
    named = []
    if isinstance(model, dict):
        described = str(model.get("description")).startswith("{") and model.keys() & {
            "script",
            "hf",
        }
        named = [k for k in NAMES_OTHERS if k in model and not (k == "description" and described)]
    if named:
        what = f"names a file of the model with {named[0]}"
        raise InputError(Problem("job: [model]", what, "describe the model by a family"))
    job = job_from_document(document)
    if usd_max is not None:
        job = replace(job, objective=replace(job.objective, max_usd_total=usd_max))
    return job if job.steps is None else replace(job, steps=max(job.steps - begun, 1))


def with_speed_goal(job: Job, *, keeps_deadline: bool) -> Job:
    """Return the job with speed as its goal, if machines are rented for its deadline."""
    if not keeps_deadline:
        return job
    return replace(job, objective=replace(job.objective, goal="throughput"))


def job_shape(job: Job) -> tuple[int, int]:
    """Layers, and pieces into which the state of each layer is cut.

    Tensors shared by layers count as one more layer, tensors that are not cut as one more piece.
    """
    return len(job.model.layers) + 1, job.max_tp + 1


def saving_of(job: Job) -> Saving:
    """Checkpoint settings of the job; ``None`` for an interval that is chosen at run time."""
    kept = job.checkpoint
    memory = None if kept.memory_every == "auto" else kept.memory_every
    persist = None if kept.persist_every == "auto" else kept.persist_every
    uri = kept.uri
    if uri is not None and uri.startswith("/"):
        uri = f"file://{uri}"  # One spelling, so that agents and sailord build equal object names.
    return Saving(uri, memory, persist, kept.keep, kept.survive, kept.start_over)
