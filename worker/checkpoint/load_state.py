"""Copies between a rank's buffers and the pieces of snapshots.

A piece has the same bytes under any plan: one flat layout for each kind of state, one after the
other. In a buffer its tensors may be narrow views, if the rank holds several atoms side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields

import torch
from torch import Tensor

from worker.checkpoint.placement import PieceKey, StateShape
from worker.checkpoint.snapshot_file import SavedProgress, layer_from_number, layer_number
from worker.layout.rank_layout import piece_layout
from worker.training.flat_buffers import LayerBuffer
from worker.training.precision import LossScale, NumberFormats
from worker.training.trainer import TrainingProgress

_INTEGERS = {4: torch.int32, 8: torch.int64}


def flat_states(buffer: LayerBuffer) -> tuple[Tensor, ...]:
    """Return the kinds of state that a piece consists of, in their order."""
    return (buffer.master, *buffer.moments)


def views_in_buffer(buffer: LayerBuffer, flat: Tensor, piece: int) -> list[Tensor]:
    """Return the views of a piece's tensors in a rank's flat buffer."""
    if piece == buffer.atoms:
        return [buffer.unsplit_part(flat)]
    if len(buffer.held) == 1:
        return [buffer.split_part(flat)]
    return buffer.atom_views(flat, range(piece, piece + 1))


def views_in_piece(buffer: LayerBuffer, flat: Tensor, piece: int) -> list[Tensor]:
    """Return the same tensors as views of one kind of a piece's bytes."""
    if piece == buffer.atoms or len(buffer.held) == 1:
        return [flat]
    image = piece_layout(buffer.specs, piece, atoms=buffer.atoms)
    return [flat[s.offset : s.offset + s.elements].view(s.shape) for s in image.slots]


def fill_piece(
    buffers: Mapping[int, LayerBuffer],
    key: PieceKey,
    body: bytearray | memoryview,
    shape: StateShape,
) -> None:
    """Copy a piece into a rank's buffers: its weights, and the moments that the rank keeps."""
    number, piece = key
    buffer = buffers[layer_from_number(number, layers=shape.layers)]
    elements = piece_layout(buffer.specs, piece, atoms=buffer.atoms).elements
    keeps_moments = any(
        part.with_unsplit if piece == buffer.atoms else piece in part.atoms for part in buffer.owned
    )
    kinds = flat_states(buffer) if keeps_moments else (buffer.master,)
    # torch warns about writable buffers; pass a read-only view.
    readonly = memoryview(body).toreadonly() if isinstance(body, bytearray) else body
    with torch.no_grad():
        for kind, flat in enumerate(kinds):
            offset = kind * elements * flat.element_size()
            found = torch.frombuffer(readonly, dtype=flat.dtype, count=elements, offset=offset)
            for mine, given in zip(
                views_in_buffer(buffer, flat, piece),
                views_in_piece(buffer, found, piece),
                strict=True,
            ):
                mine.copy_(given)


def derive_weights(buffers: Mapping[int, LayerBuffer], precision: NumberFormats) -> None:
    """Round the weights for computing, once all pieces are copied."""
    with torch.no_grad():
        for buffer in buffers.values():
            if buffer.compute is not buffer.master:
                precision.derive(buffer.master, into=buffer.compute)


def bit_sums(
    buffers: Mapping[int, LayerBuffer], shape: StateShape, *, zero: int
) -> tuple[list[PieceKey], Tensor | None]:
    """Return the pieces that a rank holds, each with the sum of its bits as integers.

    One pass on the device, without waiting for it. Sums wrap around, and a flipped bit changes the
    sum, whichever bit it is. With ZeRO-1 not all holders have the moments, so the weights alone
    count.
    """
    keys, sums = [], []
    for layer, buffer in buffers.items():
        kinds = (buffer.master,) if zero else flat_states(buffer)
        held = len(buffer.held)
        by_atom = torch.zeros(held, dtype=torch.int64, device=buffer.master.device)
        unsplit = by_atom.new_zeros(1)
        for flat in kinds:
            bits = flat.detach().view(_INTEGERS[flat.element_size()])
            unsplit += buffer.unsplit_part(bits).sum(dtype=bits.dtype)
            if held == 1:
                by_atom += buffer.split_part(bits).sum(dtype=bits.dtype)
                continue
            for part in buffer.views_by_atom(bits):
                others = [dim for dim in range(part.dim()) if dim > 0]
                by_atom += part.sum(dim=others, dtype=bits.dtype)
        number = layer_number(layer, layers=shape.layers)
        keys += [(number, piece) for piece in (*buffer.held, buffer.atoms)]
        # How often 32-bit sums have wrapped around depends on the order of the additions.
        counted = -1 if buffer.master.element_size() == 8 else 2**32 - 1
        sums += [by_atom & counted, unsplit & counted]
    return keys, torch.cat(sums) if sums else None


def saved_progress(progress: TrainingProgress) -> SavedProgress:
    """Return the progress of training in the form of headers."""
    rest = {each.name: getattr(progress, each.name) for each in fields(progress)}
    scale: LossScale = rest.pop("scale")
    return SavedProgress(scale=scale.factor, good_steps=scale.good_steps, **rest)


def progress_from(saved: SavedProgress) -> TrainingProgress:
    """Return the progress of training that a header holds."""
    rest = asdict(saved)
    scale = LossScale(rest.pop("scale"), rest.pop("good_steps"))
    return TrainingProgress(scale=scale, **rest)
