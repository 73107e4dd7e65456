"""Where the elements of a tensor are in the pieces of a job; without torch.

A tensor is read and written in *blocks*: some of its rows, or the part of them in one atom, which
is contiguous in a piece. A block is small, so a checkpoint of any size needs little memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from simulator.spec.job import OPTIMIZER_MOMENTS, Job
from worker.checkpoint.compatibility import dtype_of
from worker.checkpoint.placement import PieceKey
from worker.checkpoint.snapshot_file import layer_number
from worker.layout.rank_layout import TIED, FlatLayout, Tables, piece_layout
from worker.layout.tensor_table import tensors_of
from worker.models.weight_files.foreign_tensors import TensorId
from worker.types import LogicalTensor

BLOCK_BYTES = 2**20
"""The most bytes of a block, unless one row is larger."""


@dataclass(frozen=True, slots=True)
class PieceBlock:
    """Some elements of one kind of a tensor's state, and their place in a piece."""

    piece: PieceKey
    offset: int
    """In bytes, from the beginning of the piece."""
    first: tuple[int, int]
    """The row and the column of the full tensor at which the block begins."""
    shape: tuple[int, ...]


def whole_block(shape: tuple[int, ...]) -> PieceBlock:
    """Return the block of a tensor that is in memory, in no piece."""
    return PieceBlock((0, 0), 0, (0, 0), shape)


@dataclass(frozen=True)
class PieceMap:
    """The pieces of a job's state: the weights (kind 0) and the moments of all tensors."""

    job: Job
    _layouts: dict[tuple[int, int], FlatLayout] = field(default_factory=dict)

    @property
    def kinds(self) -> int:
        """How many kinds of state each tensor has."""
        return 1 + OPTIMIZER_MOMENTS[self.job.optimizer]

    @property
    def element_bytes(self) -> int:
        """The bytes of an element."""
        return 8 if dtype_of(self.job) == "float64" else 4

    @cached_property
    def tables(self) -> Tables:
        """The tensors of each layer."""
        return tensors_of(self.job)

    @cached_property
    def specs(self) -> Mapping[TensorId, tuple[int, LogicalTensor]]:
        """The layer of each tensor (``TIED`` for shared ones), and its form."""
        return {
            (0 if layer == TIED else layer, spec.name): (layer, spec)
            for layer, specs in self.tables.items()
            for spec in specs
        }

    def piece_bytes(self) -> Iterator[tuple[PieceKey, int]]:
        """Yield every piece of the job with its size, in the order of files."""
        layers = len(self.job.model.layers)
        numbered = {layer_number(layer, layers=layers): layer for layer in self.tables}
        for number in sorted(numbered):
            for piece in range(self.job.max_tp + 1):
                elements = self._layout(numbered[number], piece).elements
                yield (number, piece), self.kinds * elements * self.element_bytes

    def blocks(self, tensor: TensorId, kind: int) -> Iterator[PieceBlock]:
        """Yield all blocks of one kind of a tensor's state."""
        layer, spec = self.specs[tensor]
        atoms, dim = self.job.max_tp, spec.split_dim
        number = layer_number(layer, layers=len(self.job.model.layers))
        for piece in (atoms,) if dim is None else range(atoms):
            image = self._layout(layer, piece)
            (slot,) = (each for each in image.slots if each.spec.name == spec.name)
            shape = slot.shape or (1,)
            begin = [0, 0]
            if dim is not None:
                begin[dim] = piece * shape[dim]
            row = math.prod(shape[1:])
            step = max(1, BLOCK_BYTES // (row * self.element_bytes)) if row else shape[0]
            for first in range(0, shape[0], step):
                rows = min(step, shape[0] - first)
                before = kind * image.elements + slot.offset + first * row
                yield PieceBlock(
                    (number, piece),
                    before * self.element_bytes,
                    (begin[0] + first, begin[1]),
                    (rows, *shape[1:]),
                )

    def _layout(self, layer: int, piece: int) -> FlatLayout:
        known = self._layouts.get((layer, piece))
        if known is None:
            known = piece_layout(self.tables[layer], piece, atoms=self.job.max_tp)
            self._layouts[layer, piece] = known
        return known
