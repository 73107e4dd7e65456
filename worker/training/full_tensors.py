"""The state of a model as whole tensors, in which no plan shows: taken apart, put together, judged.

What ranks hold is merged from pieces and cut again for another plan, and checksums tell whether
all that hold the same atom hold the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from worker.layout.rank_layout import Slot
from worker.training.flat_buffers import LayerMemory
from worker.training.precision import Precision
from worker.types import TensorSpec

Kind = str
"""``master``, ``gradient``, or ``moment 0`` and so on."""
Key = tuple[int, str, Kind]
Pieces = dict[Key, list[tuple[range | None, Tensor]]]
"""Of each logical tensor, which atoms (``None``: all of what is not cut) have which values."""


def kinds_of(memory: LayerMemory) -> dict[Kind, Tensor]:
    """The flat tensors that a layer's state consists of."""
    moments = {f"moment {i}": moment for i, moment in enumerate(memory.moments)}
    return {"master": memory.master, "gradient": memory.gradient, **moments}


def pieces_of(memories: Iterable[LayerMemory]) -> Pieces:
    """Copies of all that one rank holds."""
    found: Pieces = {}

    def add(memory: LayerMemory, slot: Slot, kind: Kind, held: range | None, view: Tensor) -> None:
        key = (memory.layer, slot.spec.name, kind)
        found.setdefault(key, []).append((held, view.detach().cpu().clone()))

    for memory in memories:
        for kind, flat in kinds_of(memory).items():
            for atoms, with_whole in _kept(memory, kind):
                views = memory.views_of(flat, atoms) if atoms else []
                for slot, view in zip(memory.split.slots, views, strict=False):
                    add(memory, slot, kind, atoms, view)
                if with_whole:
                    whole = memory.views(flat)[len(memory.split.slots) :]
                    for slot, view in zip(memory.whole.slots, whole, strict=True):
                        add(memory, slot, kind, None, view)
    return found


def _kept(memory: LayerMemory, kind: Kind) -> list[tuple[range, bool]]:
    """Of which atoms, and whether of what is not cut, a rank keeps this kind of state."""
    if kind.startswith("moment"):
        return [(part.atoms, part.with_whole) for part in memory.owned]
    return [(memory.held, True)]


def merge(
    ranks: Iterable[Pieces], tables: Mapping[int, tuple[TensorSpec, ...]]
) -> dict[Key, Tensor]:
    """Put whole tensors together from what all ranks hold; what is held twice must agree."""
    dims = {(layer, spec.name): spec for layer, specs in tables.items() for spec in specs}
    whole: dict[Key, Tensor] = {}
    atoms: dict[Key, dict[range, Tensor]] = {}
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


def load(memory: LayerMemory, logical: Mapping[Key, Tensor], precision: Precision) -> None:
    """Fill a rank's memory of a layer with its part of whole tensors."""
    for kind, flat in kinds_of(memory).items():
        for slot, view in zip(memory.slots, memory.views(flat), strict=True):
            values = logical.get((memory.layer, slot.spec.name, kind))
            if values is None:
                assert kind == "gradient", f"nothing is known of {slot.spec.name}'s {kind}"
                continue
            dim = slot.spec.split_dim
            if dim is not None:
                each = slot.spec.shape[dim] // memory.atoms
                values = values.narrow(dim, memory.held.start * each, len(memory.held) * each)
            view.copy_(values)
    if memory.compute is not memory.master:
        precision.derive(memory.master, into=memory.compute)


def checksums(memory: LayerMemory) -> dict[tuple[int, int | None, Kind], str]:
    """A digest of each atom, and of what is not cut: equal on all that hold the same."""
    found: dict[tuple[int, int | None, Kind], str] = {}
    for kind, flat in kinds_of(memory).items():
        for atoms, with_whole in _kept(memory, kind):
            for atom in atoms if memory.split.slots else ():
                part = memory.atoms_of(flat, range(atom, atom + 1))
                found[memory.layer, atom, kind] = _digest(part)
            if with_whole and memory.whole.slots:
                found[memory.layer, None, kind] = _digest(memory.whole_part(flat))
    return found


def _digest(part: Tensor) -> str:
    data = part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
