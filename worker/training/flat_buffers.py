"""What a rank keeps of each layer: weights, gradients and moments in flat memory.

Each kind of state is one flat tensor: first the atoms that the rank holds, then what is not cut.
A layer that nobody cuts further is therefore one contiguous message of the gradient sync, and an
atom is contiguous wherever a rank holds just one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
from worker.models.apply_plan import LocalLayer
from worker.training.precision import Precision
from worker.types import LogicalTensor


@dataclass(slots=True)
class LayerBuffer:
    """All that one rank keeps of one layer."""

    layer: int
    specs: tuple[LogicalTensor, ...]
    atoms: int
    held: range
    split: FlatLayout
    whole: FlatLayout
    parameters: tuple[nn.Parameter, ...]
    """What the model computes with, in the order of ``slots``."""
    master: Tensor
    compute: Tensor
    """The same memory as ``master`` where the model computes with what is kept."""
    gradient: Tensor
    moments: tuple[Tensor, ...]
    """Empty where another rank keeps them all."""
    owned: tuple[Bucket, ...]
    """The parts of which this rank keeps the moments."""
    _gradients: list[Tensor] = field(default_factory=list)

    @property
    def slots(self) -> tuple[TensorSlot, ...]:
        return (*self.split.slots, *self.whole.slots)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors within flat memory, in the order of ``slots``."""
        cut, rest = self.split_part(flat), self.unsplit_part(flat)
        return [*_views(cut, self.split), *_views(rest, self.whole)]

    def split_part(self, flat: Tensor) -> Tensor:
        return flat[: self.split.elements]

    def unsplit_part(self, flat: Tensor) -> Tensor:
        return flat[self.split.elements :]

    def atom_views(self, flat: Tensor, wanted: range) -> list[Tensor]:
        """Some atoms of the tensors that are cut, within flat memory."""
        assert set(wanted) <= set(self.held), "a rank has its own atoms"
        found = []
        for slot, view in zip(
            self.split.slots, _views(self.split_part(flat), self.split), strict=True
        ):
            dim = slot.spec.split_dim
            assert dim is not None, "what is cut is cut somewhere"
            each = slot.shape[dim] // len(self.held)
            first = (wanted.start - self.held.start) * each
            found.append(view.narrow(dim, first, each * len(wanted)))
        return found

    def gather_atoms(self, flat: Tensor, wanted: range) -> Tensor:
        """The flat form of some atoms: memory itself if these are all, else a copy."""
        if wanted == self.held:
            return self.split_part(flat)
        image = atoms_layout(self.specs, wanted, atoms=self.atoms)
        copy = flat.new_zeros(image.elements)
        for mine, theirs in zip(self.atom_views(flat, wanted), _views(copy, image), strict=True):
            theirs.copy_(mine)
        return copy

    def scatter_atoms(self, flat: Tensor, wanted: range, values: Tensor) -> None:
        """Write back what ``gather_atoms`` copied out."""
        if values.data_ptr() == flat.data_ptr():
            return  # It was no copy.
        image = atoms_layout(self.specs, wanted, atoms=self.atoms)
        for mine, theirs in zip(self.atom_views(flat, wanted), _views(values, image), strict=True):
            mine.copy_(theirs)

    def gather_bucket(self, flat: Tensor, part: Bucket) -> Tensor:
        """What flat memory has of a part: in place where it lies in one piece, else a copy."""
        if part.with_unsplit and len(part.atoms) > 0:
            return flat
        if part.with_unsplit:
            return self.unsplit_part(flat)
        return self.gather_atoms(flat, part.atoms)

    def scatter_bucket(self, flat: Tensor, part: Bucket, values: Tensor) -> None:
        """Write back what ``gather_bucket`` copied out."""
        if not part.with_unsplit:
            self.scatter_atoms(flat, part.atoms, values)

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self.gradient.zero_()

    def collect_gradients(self) -> None:
        """Add what a backward pass has left at parameters of another precision than sums have."""
        if self.compute.dtype == self.gradient.dtype:
            return  # Autograd has added to our memory itself.
        found = [(i, p.grad) for i, p in enumerate(self.parameters) if p.grad is not None]
        if not found:
            return
        torch._foreach_add_([self._gradients[i] for i, _ in found], [g for _, g in found])
        for parameter in self.parameters:
            parameter.grad = None

    def zero_duplicate_gradients(self) -> None:
        """Leave it to others to tell the gradients that all ranks of a stage have alike."""
        for slot, view in zip(
            self.whole.slots, _views(self.unsplit_part(self.gradient), self.whole), strict=True
        ):
            if slot.spec.gradient == "same":
                view.zero_()


def _views(flat: Tensor, image: FlatLayout) -> list[Tensor]:
    return [flat[s.offset : s.offset + s.elements].view(s.shape) for s in image.slots]


def layer_buffers(
    layers: Sequence[LocalLayer],
    tables: Mapping[int, tuple[LogicalTensor, ...]],
    *,
    atoms: int,
    held: range,
    precision: Precision,
    moments: int,
    owned: Sequence[Bucket],
) -> dict[int, LayerBuffer]:
    """Move the parameters of a rank's layers into flat memory, in the order of the sync.

    ``owned`` are the parts of which this rank keeps the moments.
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
    return {
        layer: _buffer(
            layer,
            tables[layer],
            found[layer],
            atoms=atoms,
            held=held,
            precision=precision,
            moments=moments,
            owned=tuple(part for part in owned if part.layer == layer),
        )
        for layer in sorted(found, reverse=True)
    }


def _buffer(
    layer: int,
    specs: tuple[LogicalTensor, ...],
    parameters: Mapping[str, nn.Parameter],
    *,
    atoms: int,
    held: range,
    precision: Precision,
    moments: int,
    owned: tuple[Bucket, ...],
) -> LayerBuffer:
    split = atoms_layout(specs, held, atoms=atoms)
    whole = unsplit_layout(specs)
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    elements = split.elements + whole.elements

    def zeros(dtype: torch.dtype) -> Tensor:
        return torch.zeros(elements, dtype=dtype, device=device)

    master = zeros(precision.master)
    compute = master if precision.computes_on_masters else zeros(precision.compute)
    ordered = tuple(parameters[slot.spec.name] for slot in (*split.slots, *whole.slots))
    buffer = LayerBuffer(
        layer,
        specs,
        atoms,
        held,
        split,
        whole,
        ordered,
        master,
        compute,
        zeros(precision.master),
        tuple(zeros(precision.master) for _ in range(moments if owned else 0)),
        owned,
    )
    for parameter, view in zip(ordered, buffer.views(master), strict=True):
        view.copy_(parameter.detach())
    if compute is not master:
        precision.derive(master, into=compute)
    gradients = buffer.views(buffer.gradient)
    for parameter, view, gradient in zip(ordered, buffer.views(compute), gradients, strict=True):
        parameter.data = view
        if compute.dtype == buffer.gradient.dtype:
            parameter.grad = gradient
    buffer._gradients = gradients
    return buffer
