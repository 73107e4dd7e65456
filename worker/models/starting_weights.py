"""The weights that a job starts from: a checkpoint's, or random ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job
from worker.data.data_files import place_of
from worker.layout.shards import shard_of
from worker.models.apply_plan import ShardValues
from worker.models.weight_files.hf_weights import open_checkpoint
from worker.types import LogicalTensor


def open_weights(job: Job, base: Path) -> Callable[[int], ShardValues] | None:
    """Open the job's checkpoint, beside the job file; ``None``: random weights."""
    if job.model.architecture is None:
        what = f"{job.model.name} has a description but no code"
        cure = "train it by a script (import sailor): docs/own-model.md"
        raise InputError(Problem("model.description", what, cure))
    if job.weights is None:
        return None
    return open_checkpoint(place_of(job, base, job.weights), job).values


def zero_weights(job: Job) -> Callable[[int], ShardValues]:
    """Return zeros as the initial weights, for a model whose state is loaded right afterwards."""

    def values(spec: LogicalTensor, held: range) -> Tensor:
        return torch.zeros(shard_of(spec, held, of=job.max_tp).shape)

    return lambda _: values
