"""The weights, gradients and moments of each layer, in flat buffers.

Each kind of state is one flat tensor: the rank's atoms first, then the unsplit tensors. A layer
that no other rank splits further is thus one contiguous message of the gradient sum, and an atom is
contiguous wherever a rank holds just one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from worker.layout.rank_layout import (
    TIED,
    Bucket,
    FlatLayout,
    TensorSlot,
    atoms_layout,
    unsplit_layout,
)
from worker.models.apply_plan import HeldLayer
from worker.training.precision import NumberFormats
from worker.types import LogicalTensor


@dataclass(slots=True)
class LayerBuffer:
    """All state of one layer on one rank."""

    layer: int
    specs: tuple[LogicalTensor, ...]
    atoms: int
    held: range
    split: FlatLayout
    whole: FlatLayout
    parameters: tuple[nn.Parameter, ...]
    """The module's parameters, in the order of ``slots``."""
    master: Tensor
    compute: Tensor
    """The same tensor as ``master`` if the model computes with the master weights."""
    gradient: Tensor
    moments: tuple[Tensor, ...]
    """Empty if another rank keeps all of them."""
    owned: tuple[Bucket, ...]
    """The buckets whose moments this rank keeps."""
    _gradients: list[Tensor] = field(default_factory=list)

    @property
    def slots(self) -> tuple[TensorSlot, ...]:
        return (*self.split.slots, *self.whole.slots)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of the tensors in a flat buffer, in the order of ``slots``."""
        split_flat, unsplit_flat = self.split_part(flat), self.unsplit_part(flat)
        return [*_views(split_flat, self.split), *_views(unsplit_flat, self.whole)]

    def split_part(self, flat: Tensor) -> Tensor:
        return flat[: self.split.elements]

    def unsplit_part(self, flat: Tensor) -> Tensor:
        return flat[self.split.elements :]

    def atom_views(self, flat: Tensor, wanted: range) -> list[Tensor]:
        """Return views of some atoms of the split tensors in a flat buffer."""
        assert set(wanted) <= set(self.held), "the rank does not hold these atoms"
        found = []
        for slot, view in zip(
            self.split.slots, _views(self.split_part(flat), self.split), strict=True
        ):
            dim = slot.spec.split_dim
            assert dim is not None, "a split tensor has a split dimension"
            each = slot.shape[dim] // len(self.held)
            first = (wanted.start - self.held.start) * each
            found.append(view.narrow(dim, first, each * len(wanted)))
        return found

    def views_by_atom(self, flat: Tensor) -> list[Tensor]:
        """Return views of the split tensors, each with the held atoms as its first dimension."""
        found = []
        for slot, view in zip(
            self.split.slots, _views(self.split_part(flat), self.split), strict=True
        ):
            dim = slot.spec.split_dim
            assert dim is not None, "a split tensor has a split dimension"
            found.append(torch.unflatten(view, dim, (len(self.held), -1)).movedim(dim, 0))
        return found

    def gather_atoms(self, flat: Tensor, wanted: range) -> Tensor:
        """Return some atoms as one flat tensor: the buffer if these are all, else a copy."""
        if wanted == self.held:
            return self.split_part(flat)
        image = atoms_layout(self.specs, wanted, atoms=self.atoms)
        copy = flat.new_zeros(image.elements)
        for mine, theirs in zip(self.atom_views(flat, wanted), _views(copy, image), strict=True):
            theirs.copy_(mine)
        return copy

    def scatter_atoms(self, flat: Tensor, wanted: range, values: Tensor) -> None:
        """Write back a copy made by ``gather_atoms``."""
        if values.data_ptr() == flat.data_ptr():
            return  # It is the buffer itself.
        image = atoms_layout(self.specs, wanted, atoms=self.atoms)
        for mine, theirs in zip(self.atom_views(flat, wanted), _views(values, image), strict=True):
            mine.copy_(theirs)

    def copied_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of the copy that ``gather_bucket`` makes; 0: none."""
        if bucket.with_unsplit or bucket.atoms == self.held:
            return 0
        elements = atoms_layout(self.specs, bucket.atoms, atoms=self.atoms).elements
        return elements * self.master.element_size()

    def gather_bucket(self, flat: Tensor, bucket: Bucket) -> Tensor:
        """Return a bucket as one flat tensor: in place if it is contiguous, else a copy."""
        if bucket.with_unsplit and len(bucket.atoms) > 0:
            return flat
        if bucket.with_unsplit:
            return self.unsplit_part(flat)
        return self.gather_atoms(flat, bucket.atoms)

    def scatter_bucket(self, flat: Tensor, bucket: Bucket, values: Tensor) -> None:
        """Write back a copy made by ``gather_bucket``."""
        if not bucket.with_unsplit:
            self.scatter_atoms(flat, bucket.atoms, values)

    def bucket_slots(self, bucket: Bucket) -> tuple[TensorSlot, ...]:
        """Return where each tensor is in what ``gather_bucket`` returns."""
        if not bucket.with_unsplit:
            return atoms_layout(self.specs, bucket.atoms, atoms=self.atoms).slots
        if len(bucket.atoms) > 0:
            return self.whole_slots
        return self.whole.slots

    @property
    def whole_slots(self) -> tuple[TensorSlot, ...]:
        """The slots of all tensors, by their offset in the whole buffer."""
        moved = (
            replace(slot, offset=slot.offset + self.split.elements) for slot in self.whole.slots
        )
        return (*self.split.slots, *moved)

    def take_over_parameters(self, precision: NumberFormats) -> None:
        """Copy the parameters' values into the buffers, and make the parameters views of them."""
        for parameter, view in zip(self.parameters, self.views(self.master), strict=True):
            view.copy_(parameter.detach())
        if self.compute is not self.master:
            precision.derive(self.master, into=self.compute)
        self._gradients = self.views(self.gradient)
        views = zip(self.parameters, self.views(self.compute), self._gradients, strict=True)
        for parameter, view, gradient in views:
            parameter.data = view
            if self.compute.dtype == self.gradient.dtype:
                parameter.grad = gradient

    def begin_step(self) -> None:
        """Zero the gradients."""
        self.gradient.zero_()

    def collect_gradients(self) -> None:
        """Add the gradients that a backward pass left at parameters of a lower precision."""
        if self.compute.dtype == self.gradient.dtype:
            return  # Autograd has added to our buffer.
        found = [(i, p.grad) for i, p in enumerate(self.parameters) if p.grad is not None]
        if not found:
            return
        torch._foreach_add_([self._gradients[i] for i, _ in found], [g for _, g in found])
        for parameter in self.parameters:
            parameter.grad = None

    def zero_duplicate_gradients(self) -> None:
        """Zero the gradients that TP rank 0 already contributes."""
        for slot, view in zip(
            self.whole.slots, _views(self.unsplit_part(self.gradient), self.whole), strict=True
        ):
            if slot.spec.gradient == "same":
                view.zero_()


def _views(flat: Tensor, image: FlatLayout) -> list[Tensor]:
    return [flat[s.offset : s.offset + s.elements].view(s.shape) for s in image.slots]


def layer_buffers(
    layers: Sequence[HeldLayer],
    tables: Mapping[int, tuple[LogicalTensor, ...]],
    *,
    atoms: int,
    held: range,
    precision: NumberFormats,
    moments: int,
    owned: Sequence[Bucket],
    device: torch.device,
) -> dict[int, LayerBuffer]:
    """Move the parameters of a rank's layers into flat buffers, in the order of the sums.

    ``owned`` are the buckets whose moments this rank keeps. All buffers are on ``device``, also
    those of layers that have nothing to train or whose tensors are tied.
    """
    found: dict[int, dict[str, nn.Parameter]] = {}
    shared = {spec.name for spec in tables[TIED]}
    for layer in sorted(layers, key=lambda layer: -layer.index):
        own = found.setdefault(layer.index, {})
        for tensor in layer.tensors:
            name = tensor.spec.tied_name
            if name is not None or (layer.index == 0 and tensor.spec.name in shared):
                found.setdefault(TIED, {})[name or tensor.spec.name] = tensor.parameter
            else:
                own[tensor.spec.name] = tensor.parameter
    buffers = {}
    for index in sorted(found, reverse=True):
        specs, parameters = tables[index], found[index]
        split, whole = atoms_layout(specs, held, atoms=atoms), unsplit_layout(specs)
        zeros = partial(torch.zeros, split.elements + whole.elements, device=device)
        master = zeros(dtype=precision.master)
        computes_on_masters = precision.computes_on_masters
        compute = master if computes_on_masters else zeros(dtype=precision.compute)
        ordered = tuple(parameters[slot.spec.name] for slot in (*split.slots, *whole.slots))
        kept = tuple(bucket for bucket in owned if bucket.layer == index)
        gradient = zeros(dtype=precision.master)
        kinds = tuple(zeros(dtype=precision.master) for _ in range(moments if kept else 0))
        states = master, compute, gradient
        buffer = LayerBuffer(index, specs, atoms, held, split, whole, ordered, *states, kinds, kept)
        buffer.take_over_parameters(precision)
        buffers[index] = buffer
    return buffers
