"""Cuts a small weighted graph into parts of given weight with light edges between them.

Recursive bisection with swaps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.arrays import Bools, Floats, prefix_sums

SLACK = 0.03
"""Part of the whole weight by which a side may miss its share, unless no start comes as close."""
TOLERANCE = 1e-9


def graph_parts(weights: Sequence[float], edges: Floats, count: int) -> list[list[int]]:
    """``count`` parts of about equal weight with light edges between them, vertices ascending."""
    assert 0 < count <= len(weights), (count, len(weights))
    return _parts(np.asarray(weights, dtype=float), edges, list(range(len(weights))), count)


def _parts(weights: Floats, edges: Floats, mine: list[int], count: int) -> list[list[int]]:
    if count == 1:
        return [mine]
    half = count // 2
    sides = _bisect(weights[mine], edges[np.ix_(mine, mine)], half=half, count=count)
    left = [vertex for vertex, side in zip(mine, sides, strict=True) if side]
    right = [vertex for vertex, side in zip(mine, sides, strict=True) if not side]
    return _parts(weights, edges, left, half) + _parts(weights, edges, right, count - half)


def _bisect(weights: Floats, edges: Floats, *, half: int, count: int) -> Bools:
    """Two sides; the first gets ``half`` of ``count`` parts."""
    target = weights.sum() * half / count
    most = len(weights) - (count - half)
    starts = [_block(weights, target), _scatter(weights, target)]
    found = []
    for start in starts:
        _keep_counts(start, least=half, most=most)
        sides = _swap_pairs(weights, edges, start, target)
        cut = float(edges[np.ix_(sides, ~sides)].sum())
        excess = max(abs(float(weights[sides].sum()) - target), SLACK * float(weights.sum()))
        found.append((excess, cut, sides))
    return min(found, key=lambda one: one[:2])[2]


def _block(weights: Floats, target: float) -> Bools:
    """The first vertices, until their weight is as close to the target as it gets."""
    sums = prefix_sums(weights)
    sides = np.zeros(len(weights), dtype=bool)
    sides[: int(np.argmin(np.abs(sums - target)))] = True
    return sides


def _scatter(weights: Floats, target: float) -> Bools:
    """Vertices spread evenly, so that each neighbourhood gives its share."""
    sums = np.cumsum(weights) * (target / weights.sum())
    sides = np.zeros(len(weights), dtype=bool)
    taken = 0.0
    for vertex, weight in enumerate(weights):
        if taken + weight / 2 <= sums[vertex]:
            sides[vertex] = True
            taken += float(weight)
    return sides


def _keep_counts(sides: Bools, *, least: int, most: int) -> None:
    """Leave each side at least one vertex for each of its parts."""
    for vertex in range(len(sides)):
        if sides.sum() < least and not sides[vertex]:
            sides[vertex] = True
    for vertex in reversed(range(len(sides))):
        if sides.sum() > most and sides[vertex]:
            sides[vertex] = False


def _swap_pairs(weights: Floats, edges: Floats, sides: Bools, target: float) -> Bools:
    """Swap the pair that lightens the cut most, within balance, until none does."""
    slack = max(SLACK * weights.sum(), abs(weights[sides].sum() - target)) + TOLERANCE
    for _ in range(len(weights)):
        left, right = np.flatnonzero(sides), np.flatnonzero(~sides)
        between = edges[np.ix_(left, right)]
        gain_left = between.sum(axis=1) - edges[np.ix_(left, left)].sum(axis=1)
        gain_right = between.sum(axis=0) - edges[np.ix_(right, right)].sum(axis=1)
        gain = gain_left[:, None] + gain_right[None, :] - 2 * between
        after = weights[left].sum() - weights[left][:, None] + weights[right][None, :]
        gain = np.where(np.abs(after - target) <= slack, gain, -np.inf)
        best = int(np.argmax(gain)) if gain.size else -1
        if best < 0 or gain.flat[best] <= TOLERANCE * max(float(edges.max()), 1e-300):
            break
        one, other = divmod(best, len(right))
        sides[left[one]], sides[right[other]] = False, True
    return sides
