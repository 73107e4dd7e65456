"""The part of a full tensor that a rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from worker.types import LogicalTensor


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of one tensor: a range of rows and columns of it, viewed as a matrix."""

    rows: range
    columns: range
    # Elements of a full row.
    width: int
    shape: tuple[int, ...]


def shard_of(spec: LogicalTensor, atoms: range, *, of: int) -> Shard:
    """Return the shard that a rank with these of the ``of`` atoms holds."""
    first, *others = spec.shape
    width = math.prod(others)
    if spec.split_dim is None:
        return Shard(range(first), range(width), width, spec.shape)
    assert spec.split_dim < 2, "tensors are split by rows or by columns"
    take_shard = spec.shape[spec.split_dim] // of
    held = range(atoms.start * take_shard, atoms.stop * take_shard)
    shape = (*spec.shape[: spec.split_dim], len(held), *spec.shape[spec.split_dim + 1 :])
    if spec.split_dim == 0:
        return Shard(held, range(width), width, shape)
    inner = width // spec.shape[1]
    return Shard(range(first), range(held.start * inner, held.stop * inner), width, shape)


def take_shard(whole: Tensor, shard: Shard) -> Tensor:
    """Copy a shard out of an unpadded tensor; rows beyond its end are 0."""
    matrix = whole.reshape(len(whole), -1)
    found = matrix[shard.rows.start : shard.rows.stop, shard.columns.start : shard.columns.stop]
    out = whole.new_zeros(len(shard.rows), len(shard.columns))
    out[: len(found)] = found
    return out.view(shard.shape)
