"""Metis' balancers: samples over the replicas of a stage, layers over the stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

SLICES = 7
"""Equal parts in which a layer is cut before stages compete for them."""
ADJUSTMENTS_MAX = 3


def share_samples(samples: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Divide samples in the proportion of speeds; the largest fractions are rounded up."""
    total = sum(speeds)
    wanted = [samples * speed / total for speed in speeds]
    shares = [int(share) for share in wanted]
    fractions = sorted(range(len(shares)), key=lambda i: shares[i] - wanted[i])
    for index in fractions[: samples - sum(shares)]:
        shares[index] += 1
    return tuple(shares)


def binary_digits(number: int) -> list[int]:
    """The powers of two that sum up to a number, largest first."""
    return [1 << k for k in reversed(range(number.bit_length())) if number >> k & 1]


def balance_layers(capacities: Sequence[float], demands: Sequence[float]) -> tuple[int, ...]:
    """Layer boundaries that bring the stages' demands close to their capacities.

    A layer without a stage that has most of its slices vanishes, and the last boundary is below the
    number of layers (quirk, kept here: the caller decides).
    """
    owners = _share_slices(capacities, demands)
    layers: list[list[int]] = [[] for _ in capacities]
    for layer in range(len(demands)):
        mine = owners[layer * SLICES : (layer + 1) * SLICES]
        for stage in range(len(capacities)):
            if mine.count(stage) > SLICES / 2:
                layers[stage].append(layer)
    counts = _adjust_layers(layers, capacities, demands)
    return (0, *accumulate(counts))


def _share_slices(capacities: Sequence[float], demands: Sequence[float]) -> list[int]:
    """The stage that wins each slice."""
    slices = [demand / SLICES for demand in demands for _ in range(SLICES)]
    left, last = list(capacities), len(capacities) - 1
    owners = [-1] * len(slices)
    taken: list[list[int]] = [[] for _ in capacities]

    def give(index: int, stage: int) -> None:
        owners[index] = stage
        taken[stage].append(index)
        left[stage] -= slices[index]

    # The last layer, and one slice more, are kept for the last stage.
    reserved = len(slices) - 1 - SLICES
    position = 0
    for stage in range(last):
        while position < reserved:
            position += 1
            if left[stage] <= slices[position - 1]:
                break  # Unassigned for now; the next stage starts after it.
            give(position - 1, stage)
    free = [index for index, owner in enumerate(owners) if owner < 0]
    for count, index in enumerate(reversed(free)):
        if count >= SLICES and (index + 1 != taken[last][-1] or left[last] <= slices[index]):
            break
        give(index, last)
    ends = [(min(t), max(t)) if t else None for t in taken]
    for index in (i for i in free if owners[i] < 0):
        below = [(end[1], stage) for stage, end in enumerate(ends) if end and end[1] < index]
        above = [(end[0], stage) for stage, end in enumerate(ends) if end and end[0] > index]
        low = max(below)[1] if below else 0
        high = min(above)[1] if above else last
        stage = max(range(low, high + 1), key=lambda s: (left[s], -s), default=low)
        give(index, stage)
        mine = ends[stage]
        ends[stage] = (min(mine[0], index), max(mine[1], index)) if mine else (index, index)
    return owners


def _adjust_layers(
    layers: list[list[int]], capacities: Sequence[float], demands: Sequence[float]
) -> list[int]:
    """Layers per stage after the stage with the most room took a few from its neighbours."""
    left = [
        capacity - sum(demands[layer] for layer in mine)
        for capacity, mine in zip(capacities, layers, strict=True)
    ]
    for _ in range(ADJUSTMENTS_MAX):
        taker = max(range(len(left)), key=lambda s: (left[s], -s))
        around = [s for s in (taker - 1, taker + 1) if 0 <= s < len(left)]
        giver = min(around, key=lambda s: left[s], default=taker)
        if giver == taker or len(layers[giver]) <= 1:
            break
        layer = layers[giver][-1] if giver < taker else layers[giver][0]
        moved = list(left)
        moved[giver] += demands[layer]
        moved[taker] -= demands[layer]
        if max(moved) > max(left):
            break
        left = moved
        layers[giver].remove(layer)
        layers[taker].insert(0 if giver > taker else len(layers[taker]), layer)
        layers[taker].sort()
    return [len(mine) for mine in layers]


def adapt_capacities(
    capacities: Sequence[float], *, memory_mb: Sequence[float], demand_mb: Sequence[float]
) -> list[float] | None:
    """Move compute capacity from stages that do not fit to those with spare memory.

    ``None`` if these cannot take all of it.
    """
    adapted, offers, rest = list(capacities), [0.0] * len(capacities), 0.0
    for stage, (capacity, memory, demand) in enumerate(
        zip(capacities, memory_mb, demand_mb, strict=True)
    ):
        if memory >= demand:
            offers[stage] = capacity * memory / demand - capacity
        else:
            adapted[stage] = 0.9 * capacity * memory / demand
            rest += capacity - adapted[stage]
    if sum(offers) < rest:
        return None
    while rest > 0.01:
        takers = [stage for stage, offer in enumerate(offers) if offer > 0.001]
        if not takers:
            return None
        total = sum(capacities[stage] for stage in takers)
        for stage in takers:
            part = min(rest * capacities[stage] / total, offers[stage])
            adapted[stage] += part
            offers[stage] -= part
            rest -= part
    return adapted
