"""Between a rank's memory and the pieces of snapshots: the same bytes under any plan.

A piece lies in a file as its image says, each kind of state after the other. In memory its tensors
may be narrow views, where a rank holds several atoms side by side.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from worker.checkpoint.placement import Key, Shape
from worker.checkpoint.replica_check import DIGEST_END
from worker.checkpoint.snapshot_file import checksum, layer_of, number_of
from worker.layout.rank_layout import Image, image_of_atoms, image_of_whole
from worker.training.flat_buffers import LayerMemory
from worker.training.precision import Precision


def flats_of(memory: LayerMemory) -> tuple[Tensor, ...]:
    """The kinds of state that a piece consists of, in their order."""
    return (memory.master, *memory.moments)


def views_in_memory(memory: LayerMemory, flat: Tensor, piece: int) -> list[Tensor]:
    """Where a piece's tensors are in a rank's flat memory."""
    if piece == memory.atoms:
        return [memory.whole_part(flat)]
    if len(memory.held) == 1:
        return [memory.split_part(flat)]
    return memory.views_of(flat, range(piece, piece + 1))


def views_in_piece(memory: LayerMemory, flat: Tensor, piece: int) -> list[Tensor]:
    """The same tensors in one kind of a piece's bytes."""
    if piece == memory.atoms or len(memory.held) == 1:
        return [flat]
    image = image_of_piece(memory, piece)
    return [flat[s.offset : s.offset + s.elements].view(s.shape) for s in image.slots]


def image_of_piece(memory: LayerMemory, piece: int) -> Image:
    """How one kind of a piece is laid out."""
    if piece == memory.atoms:
        return image_of_whole(memory.specs)
    return image_of_atoms(memory.specs, range(piece, piece + 1), atoms=memory.atoms)


def fill(
    memories: Mapping[int, LayerMemory],
    bodies: Mapping[Key, bytearray | memoryview],
    shape: Shape,
    precision: Precision,
) -> None:
    """Put pieces into a rank's memory: the weights of all, the moments of what it keeps."""
    with torch.no_grad():
        for (number, piece), body in bodies.items():
            memory = memories[layer_of(number, layers=shape.layers)]
            elements = image_of_piece(memory, piece).elements
            kinds = flats_of(memory) if _keeps_moments(memory, piece) else (memory.master,)
            for kind, flat in enumerate(kinds):
                # One wants to write to it, says torch, if what is read could be written.
                found = torch.frombuffer(
                    memoryview(body).toreadonly() if isinstance(body, bytearray) else body,
                    dtype=flat.dtype,
                    count=elements,
                    offset=kind * elements * flat.element_size(),
                )
                for mine, given in zip(
                    views_in_memory(memory, flat, piece),
                    views_in_piece(memory, found, piece),
                    strict=True,
                ):
                    mine.copy_(given)
        for memory in memories.values():
            if memory.compute is not memory.master:
                precision.derive(memory.master, into=memory.compute)


def _keeps_moments(memory: LayerMemory, piece: int) -> bool:
    return any(
        part.with_whole if piece == memory.atoms else piece in part.atoms for part in memory.owned
    )


def digests(memories: Mapping[int, LayerMemory], shape: Shape) -> dict[Key, int]:
    """A number for the weights of each piece: equal on all that hold the same."""
    found = {}
    for layer, memory in memories.items():
        for piece in (*memory.held, memory.atoms):
            part = (
                memory.whole_part(memory.master)
                if piece == memory.atoms
                else memory.atoms_of(memory.master, range(piece, piece + 1))
            )
            data = part.detach().cpu().contiguous().view(torch.uint8).numpy().data
            key = (number_of(layer, layers=shape.layers), piece)
            found[key] = int(checksum(data), 16) % DIGEST_END
    return found
