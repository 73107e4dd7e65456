"""Counter-based random numbers, and the order of the samples in an epoch.

An epoch is a permutation that is computed one position at a time from the seed and the step, so
nothing is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Multipliers and shifts of splitmix64 (Steele, Lea and Flood, 2014).
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def random_words(counters: Words, *key: int) -> Words:
    """Return 64 random bits for each counter, different for each key."""
    x = np.array(counters, dtype=np.uint64, ndmin=1)
    for part in (*key, 0):
        x = (x + np.uint64(part % 2**64)) * _GOLDEN
        for shift, factor in _STEPS:
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
    return x


def sample_numbers(
    step: int, positions: Sequence[int], *, global_batch: int, count: int, seed: int
) -> NDArray[np.int64]:
    """Return which of ``count`` samples are at these positions of the batch of this step.

    Every sample occurs once per epoch; an epoch may end within a batch.
    """
    places = np.asarray(positions, dtype=np.int64) + step * global_batch
    numbers = np.empty_like(places)
    epochs = places // count
    for epoch in np.unique(epochs):
        now = epochs == epoch
        numbers[now] = _shuffle(places[now] % count, count=count, key=(seed, int(epoch)))
    return numbers


def _shuffle(index: NDArray[np.int64], *, count: int, key: tuple[int, int]) -> NDArray[np.int64]:
    """Permute by a Feistel network, repeated until the result is in range."""
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    out = index.astype(np.uint64)
    outside = np.ones(len(out), dtype=bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (random_words(right, *key, turn) & mask)
        out[outside] = (left << half) | right
        outside = out >= np.uint64(count)
    return out.astype(np.int64)
