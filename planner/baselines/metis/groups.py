"""Metis' device groups: how many GPUs each stage of a pipeline gets, in powers of two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

SizeBlock = tuple[int, ...]
"""Group sizes that move as a unit when the stages are permuted."""


def device_groups(
    stages: int, *, gpus: int, variance: float, permuted_max: int
) -> Iterator[tuple[int, ...]]:
    """All sequences of group sizes that use up the GPUs and differ by no more than allowed.

    A smaller variance admits smaller groups next to large ones.
    """
    least = variance * max(gpus // stages, stages // gpus)
    shapes = [1 << k for k in range(gpus.bit_length()) if 1 << k >= least]
    for sizes in _ascending(shapes, stages, gpus):
        for blocks in distinct_orders(merged([(size,) for size in sizes], permuted_max)):
            yield tuple(chain.from_iterable(blocks))


def _ascending(shapes: Sequence[int], count: int, total: int) -> Iterator[tuple[int, ...]]:
    """Non-decreasing tuples of ``count`` shapes with that total, in lexicographic order."""
    if count == 0:
        if total == 0:
            yield ()
        return
    for index, shape in enumerate(shapes):
        if shape * count > total:
            return
        if shapes[-1] * count < total:
            return
        for rest in _ascending(shapes[index:], count - 1, total - shape):
            yield (shape, *rest)


def merged(blocks: list[SizeBlock], most: int) -> list[SizeBlock]:
    """Pair up equal smallest blocks until there are few enough, or no two smallest are equal.

    Each round pairs all of the smallest, but for one where their number is odd.
    """
    while len(blocks) > most:
        smallest = min(blocks)
        equal = blocks.count(smallest)
        pairs = equal // 2
        if pairs == 0:
            break
        rest = [block for block in blocks if block != smallest]
        blocks = [smallest * 2] * pairs + [smallest] * (equal - 2 * pairs) + rest
    return blocks


def distinct_orders(blocks: Sequence[SizeBlock]) -> Iterator[tuple[SizeBlock, ...]]:
    """Every distinct order of the blocks once, each from the last by one shift to the front.

    The order of Williams' loopless generation of multiset permutations by prefix shifts.
    """
    order = sorted(blocks, reverse=True)
    start, count = tuple(order), len(order)
    while True:
        yield tuple(order)
        falling = next((k for k in range(1, count) if order[k] > order[k - 1]), math.inf)
        if falling >= count - 1:
            moved = count - 1
        else:
            k = int(falling)
            moved = k + 1 if order[k + 1] <= order[k - 1] else k
        order.insert(0, order.pop(moved))
        if tuple(order) == start:
            return
