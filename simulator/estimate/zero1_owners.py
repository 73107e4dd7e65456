"""Which ranks keep and update what under ZeRO-1, where each bucket of a layer has one owner.

A bucket is the largest part of a layer that the same ranks hold: a range of its split parameters,
or its unsplit ones. As in ``worker.layout.rank_layout``, which this repeats for sizes alone, each
bucket goes, largest first, to the one of its holders that owns the fewest parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from simulator.arrays import Floats
from simulator.estimate.device_groups import DeviceGroups
from simulator.layer_costs.layer_costs import LayerCosts

Sizes = tuple[tuple[float, float], ...]
"""Split and unsplit parameters by layer; at the end those that embedding and head share."""


@dataclass(frozen=True, slots=True)
class OwnedMost:
    """The parameters on the rank of each device group that has the most of them."""

    kept: Floats
    """Parameters with moments: all that the rank holds of layers of which it owns a bucket."""
    updated: Floats


def owned_most(groups: DeviceGroups, costs: LayerCosts) -> OwnedMost:
    """Assign all buckets of a plan to owners."""
    columns = (groups.owner, groups.tp, groups.first, groups.end)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    kept, updated = _assign_owners(tuple(rows), _sizes(costs))
    return OwnedMost(np.array(kept), np.array(updated))


def least_kept(costs: LayerCosts, tp: int) -> Floats:
    """Return the parameters of each layer for which each rank of a plan's only pipeline keeps
    moments: those of its range of split parameters, without what embedding and head share.
    """
    held = costs.parameters(tp).copy()
    held[[0, -1]] -= costs.tied_parameters(tp)
    if tp > 1:
        held *= np.array([split > 0 for split, _ in _sizes(costs)[:-1]])
    return held


@lru_cache(maxsize=8)
def _sizes(costs: LayerCosts) -> Sizes:
    """Solve parameters(t) = split / t + unsplit from the parameters at TP 1 and at ``max_tp``."""
    atoms = costs.job.max_tp
    whole, part = costs.parameters(1).copy(), costs.parameters(atoms).copy()
    tied = costs.tied_parameters(1), costs.tied_parameters(atoms)
    for row, shared in zip((whole, part), tied, strict=True):
        row[[0, -1]] -= shared
    pairs = [*zip(whole.tolist(), part.tolist(), strict=True), tied]
    if atoms == 1:
        return tuple((one, 0.0) for one, _ in pairs)
    splits = [(one - other) * atoms / (atoms - 1) for one, other in pairs]
    return tuple((split, one - split) for split, (one, _) in zip(splits, pairs, strict=True))


@lru_cache(maxsize=256)
def _assign_owners(
    rows: tuple[tuple[int, int, int, int], ...], sizes: Sizes
) -> tuple[list[float], list[float]]:
    """Return, by row, the most kept and updated parameters of one of its ranks.

    ``rows`` are (owning row, TP degree, first layer, end layer).
    """
    shared = len(sizes) - 1
    first_rank = [0, *accumulate(tp * (owner == row) for row, (owner, tp, *_) in enumerate(rows))]
    holders: list[dict[int, int]] = [{} for _ in sizes]
    for owner, tp, first, end in rows:
        ends = [shared] if first == 0 or end == shared else []
        for layer in (*range(first, end), *ends):
            holders[layer][owner] = tp
    known: dict[tuple[tuple[int, int], ...], _Holders] = {}
    buckets = []
    # Layers descend, and the shared tensor is the last: equal sizes are assigned in this order.
    for layer in (*reversed(range(shared)), shared):
        if not holders[layer]:
            continue  # The plan has a mistake: no stage holds this layer.
        key = tuple(holders[layer].items())
        if key not in known:
            known[key] = _Holders.of(holders[layer], first_rank)
        buckets += [(size, layer, ranks) for size, ranks in known[key].buckets(*sizes[layer])]
    owned = [0.0] * first_rank[-1]
    layers_of: list[set[int]] = [set() for _ in owned]
    for size, layer, ranks in sorted(buckets, key=lambda bucket: -bucket[0]):
        rank = min(ranks, key=owned.__getitem__)
        owned[rank] += size
        layers_of[rank].add(layer)
    kept, updated = [0.0] * len(rows), [0.0] * len(rows)
    for row, (owner, tp, *_) in enumerate(rows):
        if owner != row:
            continue
        mine = slice(first_rank[row], first_rank[row] + tp)
        updated[row] = max(owned[mine])
        kept[row] = max(
            sum(sizes[layer][0] / tp + sizes[layer][1] for layer in layers)
            for layers in layers_of[mine]
        )
    return kept, updated


@dataclass(frozen=True, slots=True)
class _Holders:
    """The ranks that hold a layer: of each range of its split parameters, and all of them."""

    shares: tuple[tuple[float, list[int]], ...]
    """By range: its share of the split parameters, and the ranks that hold it."""
    ranks: list[int]
    is_whole: bool
    """Whether each rank holds all of the layer."""

    @staticmethod
    def of(holders: dict[int, int], first_rank: list[int]) -> _Holders:
        """``holders`` are the TP degrees by owning row."""
        degrees = set(holders.values())
        atoms = math.lcm(*degrees)
        edges = sorted({index * (atoms // tp) for tp in degrees for index in range(tp + 1)})
        shares = tuple(
            (
                (end - begin) / atoms,
                [first_rank[r] + begin * tp // atoms for r, tp in holders.items()],
            )
            for begin, end in pairwise(edges)
        )
        ranks = [first_rank[row] + index for row, tp in holders.items() for index in range(tp)]
        return _Holders(shares, ranks, degrees == {1})

    def buckets(self, split: float, unsplit: float) -> Iterator[tuple[float, list[int]]]:
        """Return the size and the ranks of each bucket of a layer of this size."""
        if self.is_whole:
            split, unsplit = 0.0, split + unsplit
        if split > 0:
            yield from ((split * share, ranks) for share, ranks in self.shares)
        if unsplit > 0:
            yield unsplit, self.ranks
