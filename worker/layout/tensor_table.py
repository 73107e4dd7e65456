"""The tensor table: the parameters of each layer, and how they are split into atoms.

It depends on the job alone: padding and splits follow the largest TP degree that the job may use,
so a tensor has one shape under every plan.
"""

from __future__ import annotations

from simulator.models.layers import Layer, TensorSpec
from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.layout.rank_layout import Holdings, Tables, holdings_of, tensors_by_layer
from worker.types import LogicalTensor


def table_of(job: Job, index: int, *, frozen: bool = False) -> tuple[LogicalTensor, ...]:
    """Return the trained, or the frozen, parameters of one layer in their fixed order."""
    layer = job.model.layers[index]
    return tuple(
        _spec(layer, tensor, atoms=job.max_tp, vocabulary=job.model.vocab)
        for tensor in layer.tensors
        if tensor.frozen == frozen
    )


def tables_of(job: Job) -> tuple[tuple[LogicalTensor, ...], ...]:
    """Return the parameters of every layer."""
    return tuple(table_of(job, index) for index in range(len(job.model.layers)))


def tensors_of(job: Job) -> Tables:
    """Return the tensors of each layer, with shared ones under ``TIED``."""
    return tensors_by_layer(tables_of(job))


def holdings_for(plan: Plan, job: Job) -> Holdings:
    """Return which rank holds what of the job's tensors under a plan."""
    return holdings_of(plan, tables_of(job), atoms=job.max_tp)


def _spec(layer: Layer, tensor: TensorSpec, *, atoms: int, vocabulary: int) -> LogicalTensor:
    tied = tensor.tied_to.partition("/")[2] if tensor.tied_to is not None else None
    if tensor.split_dim is None:
        return LogicalTensor(tensor.name, tensor.shape, None, tied_name=tied)
    if tensor.ways % atoms == 0:
        return LogicalTensor(tensor.name, tensor.shape, tensor.split_dim, tied_name=tied)
    size = tensor.shape[tensor.split_dim]
    if layer.kind != "block" and size == vocabulary:
        # Only vocabularies are padded, so that atoms have equal sizes.
        shape = list(tensor.shape)
        shape[tensor.split_dim] = -(-size // atoms) * atoms
        return LogicalTensor(tensor.name, tuple(shape), tensor.split_dim, tied_name=tied)
    # Fewer key and value heads than atoms: every rank holds the tensor and uses its own heads'
    # part.
    return LogicalTensor(tensor.name, tensor.shape, None, "partial", tied_name=tied)
