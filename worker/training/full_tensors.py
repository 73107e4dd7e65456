"""The state of a model as full tensors, independent of the plan.

The tensors of all ranks are merged and split again for another plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from worker.layout.rank_layout import TensorSlot
from worker.training.flat_buffers import LayerBuffer
from worker.training.precision import NumberFormats
from worker.types import LogicalTensor

StateKind = str
"""``master``, ``gradient``, or ``moment 0`` and so on."""
TensorKey = tuple[int, str, StateKind]
RankTensors = dict[TensorKey, list[tuple[range | None, Tensor]]]
"""For each tensor, the values of a range of atoms, or of ``None`` if it is unsplit."""


def flats_by_kind(buffer: LayerBuffer) -> dict[StateKind, Tensor]:
    """Return the flat tensors of a layer's state."""
    moments = {f"moment {i}": moment for i, moment in enumerate(buffer.moments)}
    return {"master": buffer.master, "gradient": buffer.gradient, **moments}


def rank_tensors(buffers: Iterable[LayerBuffer]) -> RankTensors:
    """Copy everything that one rank holds."""
    found: RankTensors = {}

    def add(
        buffer: LayerBuffer, slot: TensorSlot, kind: StateKind, held: range | None, view: Tensor
    ) -> None:
        key = (buffer.layer, slot.spec.name, kind)
        found.setdefault(key, []).append((held, view.detach().cpu().clone()))

    for buffer in buffers:
        for kind, flat in flats_by_kind(buffer).items():
            for atoms, with_unsplit in kept_parts(buffer, kind):
                views = buffer.atom_views(flat, atoms) if atoms else []
                for slot, view in zip(buffer.split.slots, views, strict=False):
                    add(buffer, slot, kind, atoms, view)
                if with_unsplit:
                    whole = buffer.views(flat)[len(buffer.split.slots) :]
                    for slot, view in zip(buffer.whole.slots, whole, strict=True):
                        add(buffer, slot, kind, None, view)
    return found


def kept_parts(buffer: LayerBuffer, kind: StateKind) -> list[tuple[range, bool]]:
    """Return the ranges of atoms that a rank keeps, and whether with the unsplit tensors.

    Of gradients only their sums are kept, which under ZeRO-1 their owners get.
    """
    if kind == "master":
        return [(buffer.held, True)]
    return [(part.atoms, part.with_unsplit) for part in buffer.owned]


def merge_ranks(
    ranks: Iterable[RankTensors], tables: Mapping[int, tuple[LogicalTensor, ...]]
) -> dict[TensorKey, Tensor]:
    """Assemble full tensors from what all ranks hold."""
    dims = {(layer, spec.name): spec for layer, specs in tables.items() for spec in specs}
    whole: dict[TensorKey, Tensor] = {}
    atoms: dict[TensorKey, dict[range, Tensor]] = {}
    for pieces in ranks:
        for key, parts in pieces.items():
            for held, values in parts:
                if held is None:
                    whole[key] = values
                else:
                    atoms.setdefault(key, {})[held] = values
    for key, parts_of in atoms.items():
        dim = dims[key[0], key[1]].split_dim
        assert dim is not None
        chosen: list[Tensor] = []
        reached = 0
        for held in sorted(parts_of, key=lambda r: (r.start, -len(r))):
            if held.start == reached:
                chosen.append(parts_of[held])
                reached = held.stop
        whole[key] = torch.cat(chosen, dim)
        assert whole[key].shape == dims[key[0], key[1]].shape, f"atoms of {key} are missing"
    return whole


def load_full_tensors(
    buffer: LayerBuffer, logical: Mapping[TensorKey, Tensor], precision: NumberFormats
) -> None:
    """Fill a layer's buffers with its shards of full tensors."""
    for kind, flat in flats_by_kind(buffer).items():
        for slot, view in zip(buffer.slots, buffer.views(flat), strict=True):
            values = logical.get((buffer.layer, slot.spec.name, kind))
            if values is None:
                assert kind == "gradient", f"the state has no {kind} of {slot.spec.name}"
                continue
            dim = slot.spec.split_dim
            if dim is not None:
                each = slot.spec.shape[dim] // buffer.atoms
                values = values.narrow(dim, buffer.held.start * each, len(buffer.held) * each)
            view.copy_(values)
    if buffer.compute is not buffer.master:
        precision.derive(buffer.master, into=buffer.compute)
