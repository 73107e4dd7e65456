"""Checks by one all-reduce that replicas are bit-equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from worker.checkpoint.placement import PieceKey
from worker.distributed.interface import Collective

DIGEST_END = 2**40
"""Digests are below 2^40, so that those of a million holders can be summed."""


class ReplicaMismatchError(RuntimeError):
    """Ranks that hold the same state have different bits."""


def check_replicas(
    mine: Mapping[PieceKey, int],
    keys: Sequence[PieceKey],
    group: Collective | None,
    *,
    rank: int,
    device: torch.device,
    what: str,
) -> None:
    """Raise ``ReplicaMismatchError`` if another rank has a different digest for a key of ours.

    A collective: all ranks call it at the same point with the same ``keys``. ``what`` completes
    the error message.
    """
    sums_and_counts = torch.zeros(2, len(keys), dtype=torch.int64)
    for place, key in enumerate(keys):
        if key in mine:
            sums_and_counts[0, place], sums_and_counts[1, place] = mine[key], 1
    both = sums_and_counts.to(device)
    sums, holders = both.tolist() if group is None else group.read_sum(both)
    for place, key in enumerate(keys):
        if key in mine and sums[place] != mine[key] * holders[place]:
            layer, piece = key
            where = f"piece {piece} of layer {layer} {what} differs between its holders"
            raise ReplicaMismatchError(f"{where} (rank {rank} is one of them)")
