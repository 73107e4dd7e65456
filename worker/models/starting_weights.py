"""The code and the weights that a job starts from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job
from worker.layout.shards import shard_of
from worker.models.apply_plan import ShardValues
from worker.models.custom import check_factory
from worker.models.hf_weights import open_checkpoint
from worker.types import LogicalTensor


def open_weights(job: Job, base: Path) -> Callable[[int], ShardValues] | None:
    """Check custom code and open a checkpoint; ``None``: each layer makes its own weights.

    Both are looked up relative to the job file, before any rank starts.
    """
    if job.factory is not None:
        sys.path.insert(0, str(base.absolute()))
        check_factory(job)
    elif job.model.architecture is None:
        what = f"{job.model.name} has a description but no code"
        raise InputError(Problem("model.factory", what, 'give factory = "module:function"'))
    if job.weights is None:
        return None
    return open_checkpoint(base / job.weights, job).values


def zero_weights(job: Job) -> Callable[[int], ShardValues]:
    """Return zeros as the initial weights, for a model whose state is loaded right afterwards."""

    def values(spec: LogicalTensor, held: range) -> Tensor:
        return torch.zeros(shard_of(spec, held, of=job.max_tp).shape)

    return lambda _: values
