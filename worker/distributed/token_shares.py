"""Shares of the tokens of activations (batch, tokens, ...) under sequence parallelism.

Between split parts, rank i of the n ranks of a stage holds the i-th of n equal slices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.distributed.interface import Collective


def gather_tokens(own: Tensor, group: Collective) -> Tensor:
    """Return all tokens, given each rank's own."""
    return group.all_gather(own.contiguous()).movedim(0, 1).flatten(1, 2)


def sum_own_tokens(partial: Tensor, group: Collective) -> Tensor:
    """Sum over the ranks, and return this rank's tokens of the sum."""
    parts = torch.unflatten(partial, 1, (group.size, -1)).movedim(1, 0)
    return group.reduce_scatter(parts.contiguous())


def own_tokens(whole: Tensor, group: Collective, *, dim: int = 1) -> Tensor:
    """Return this rank's tokens of a tensor that every rank holds in full."""
    return whole.chunk(group.size, dim)[group.index].contiguous()
