"""Copies between blocks of our tensors and the tensors of other programs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from worker.checkpoint.by_tensor.piece_blocks import PieceBlock
from worker.models.weight_files.foreign_tensors import ForeignTensor, Strip, TensorId


def fill_from_block(
    whole: Tensor, foreign: ForeignTensor, tensor: TensorId, block: PieceBlock, values: Tensor
) -> None:
    """Copy a block of one of our tensors to its places in a foreign tensor."""
    for there, here in _overlaps(whole, foreign, tensor, block, values):
        there.copy_(here)


def block_of(
    whole: Tensor, foreign: ForeignTensor, tensor: TensorId, block: PieceBlock, dtype: torch.dtype
) -> Tensor:
    """Return a block of one of our tensors; what the foreign tensor lacks is padding, and zero."""
    values = torch.zeros(block.shape, dtype=dtype)
    for there, here in _overlaps(whole, foreign, tensor, block, values):
        here.copy_(there)
    return values


def _overlaps(
    whole: Tensor, foreign: ForeignTensor, tensor: TensorId, block: PieceBlock, values: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of the same elements in a foreign tensor and in a block of ours."""
    for strip in foreign.strips:
        if strip.tensor != tensor:
            continue
        dim, span, first = strip.dim, strip.span, block.first[strip.dim]
        begin, end = max(span.start, first), min(span.stop, first + block.shape[dim])
        if begin >= end:
            continue
        there = _strip(whole, foreign, strip).narrow(dim, begin - span.start, end - begin)
        for other in range(min(2, there.ndim)):
            if other != dim:
                there = there.narrow(other, block.first[other], block.shape[other])
        yield there, values.narrow(dim, begin - first, end - begin)


def _strip(whole: Tensor, foreign: ForeignTensor, strip: Strip) -> Tensor:
    """Return the view of a strip, turned as our tensor is."""
    shaped = whole if foreign.viewed is None else whole.view(foreign.viewed)
    found = shaped.narrow(foreign.dim, strip.begin, len(strip.span))
    return found if strip.dim == foreign.dim else found.T
