"""Digests of a rank's state, to compare the holders of an atom."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from worker.training.flat_buffers import LayerBuffer
from worker.training.full_tensors import StateKind, flats_by_kind, kept_parts


def checksums(buffer: LayerBuffer) -> dict[tuple[int, int | None, StateKind], str]:
    """Return a digest of each atom and of the unsplit tensors, equal on all holders."""
    found: dict[tuple[int, int | None, StateKind], str] = {}
    for kind, flat in flats_by_kind(buffer).items():
        for atoms, with_unsplit in kept_parts(buffer, kind):
            for atom in atoms if buffer.split.slots else ():
                part = buffer.gather_atoms(flat, range(atom, atom + 1))
                found[buffer.layer, atom, kind] = _digest(part)
            if with_unsplit and buffer.whole.slots:
                found[buffer.layer, None, kind] = _digest(buffer.unsplit_part(flat))
    return found


def _digest(part: Tensor) -> str:
    data = part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
