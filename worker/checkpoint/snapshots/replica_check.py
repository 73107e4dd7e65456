"""Checks that all holders of a piece have the same bits, and finds ranks with other bits.

One all-reduce of two numbers for each piece tells every rank whether all digests are equal. Only if
they are not, a second one collects the digests by rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch

from worker.checkpoint.placement import PieceKey
from worker.distributed.interface import Collective, TransportError
from worker.training.snapshot_hook import ReplicaMismatchError

_ABSENT = -(2**63)
"""In place of the digest of a piece that a rank does not hold."""
_NAMED_MAX = 16
"""The most differing pieces whose digests are collected."""


def check_replicas(
    mine: Mapping[PieceKey, int],
    keys: Sequence[PieceKey],
    group: Collective | None,
    *,
    nodes: Mapping[int, str],
    device: torch.device,
    what: str,
    blames: bool = True,
) -> None:
    """Raise ``ReplicaMismatchError`` on all ranks if two of them have different digests of a piece.

    A collective: all ranks call it at the same point with the same ``keys``. ``nodes`` has the
    node of each rank; ``what`` completes the error message. Without ``blames`` no majority counts:
    ranks that have read the same copy agree, be it right or wrong.
    """
    if group is None:
        return
    own = [mine.get(key) for key in keys]
    # The maximum of the complements is the complement of the minimum.
    both = [[_ABSENT if each is None else each for each in own]]
    both += [[_ABSENT if each is None else ~each for each in own]]
    most, least = group.read_max(torch.tensor(both, dtype=torch.int64).to(device))
    differing = [
        key
        for key, high, low in zip(keys, most, least, strict=True)
        if high != ~low and (high, low) != (_ABSENT, _ABSENT)
    ]
    if not differing:
        return
    table = torch.zeros(2, min(len(differing), _NAMED_MAX), group.size, dtype=torch.int64)
    for row, key in enumerate(differing[:_NAMED_MAX]):
        if key in mine:
            table[0, row, group.index], table[1, row, group.index] = mine[key], 1
    digests, holds = group.read_sum(table.to(device))
    by_rank = [
        {rank: digest for rank, (digest, is_held) in enumerate(zip(*row, strict=True)) if is_held}
        for row in zip(digests, holds, strict=True)
    ]
    # The first rank that fails aborts the others, so none may fail before all know as much.
    with suppress(TransportError):
        group.read_sum(torch.zeros(1, device=device))
    layer, piece = differing[0]
    more = f" (and {len(differing) - 1} more)" if differing[1:] else ""
    where = f"piece {piece} of layer {layer}{more} {what} differs between its holders"
    blamed = sorted({rank for each in by_rank for rank in contradicted(each)}) if blames else []
    if blamed:
        text = f"{where}, and most contradict {_named(blamed, nodes)}"
        raise ReplicaMismatchError(text, blamed=blamed, keys=differing)
    if blames:
        named, why = sorted(by_rank[0]), "no majority agrees, so none can be blamed"
    else:
        named = sorted({digest: rank for rank, digest in reversed(by_rank[0].items())}.values())
        why = "a copy or a memory is wrong, and none can be blamed; if it happens again, roll back"
        why += " to a checkpoint"
    raise ReplicaMismatchError(f"{where}, {_named(named, nodes)}: {why}", keys=differing)


def contradicted(digests: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks whose digest differs from that of most holders; none without a majority."""
    ((common, count),) = Counter(digests.values()).most_common(1)
    if count * 2 <= len(digests):
        return ()
    return tuple(rank for rank, digest in digests.items() if digest != common)


def _named(ranks: Sequence[int], nodes: Mapping[int, str]) -> str:
    named = [f"rank {rank}" + f" on node {nodes[rank]}" * bool(nodes.get(rank)) for rank in ranks]
    more = [f"{len(named) - 4} more"] if named[5:] else named[4:]
    return " and ".join([*named[:4], *more])
