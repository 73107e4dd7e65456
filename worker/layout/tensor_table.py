"""The tensor table: which parameters a layer has, and how the job's atoms cut them.

It depends on the job alone: padding and cuts follow the largest TP degree that the job may ever
use, so a tensor has one logical shape under every plan.
"""

from __future__ import annotations

from simulator.models.layers import Layer, TensorSpec
from simulator.spec.job import Job
from worker.types import LogicalTensor


def table_of(job: Job, index: int) -> tuple[LogicalTensor, ...]:
    """Return the parameters of one layer in their fixed order."""
    layer = job.model.layers[index]
    return tuple(
        _spec(layer, tensor, atoms=job.max_tp, vocabulary=job.model.vocab)
        for tensor in layer.tensors
    )


def _spec(layer: Layer, tensor: TensorSpec, *, atoms: int, vocabulary: int) -> LogicalTensor:
    tied = tensor.tied_to.partition("/")[2] if tensor.tied_to is not None else None
    if tensor.split_dim is None:
        return LogicalTensor(tensor.name, tensor.shape, None, tied_name=tied)
    if tensor.ways % atoms == 0:
        return LogicalTensor(tensor.name, tensor.shape, tensor.split_dim, tied_name=tied)
    size = tensor.shape[tensor.split_dim]
    if layer.kind != "block" and size == vocabulary:
        # A vocabulary: the only thing that is padded, so that atoms are of one size.
        shape = list(tensor.shape)
        shape[tensor.split_dim] = -(-size // atoms) * atoms
        return LogicalTensor(tensor.name, tuple(shape), tensor.split_dim, tied_name=tied)
    # Fewer key and value heads than atoms: whole on every rank, which uses what its heads need.
    return LogicalTensor(tensor.name, tensor.shape, None, "partial", tied_name=tied)
