"""Samples that are computed: something to learn from, without a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.data.batch import Samples, samples_of
from worker.data.shuffle import mixed

_TOKENS_USED = 64
_STRIDES = (1, 3, 5, 7)
# One token in so many is any token, so that the loss never becomes 0.
_SURPRISE = 16
_CELLS = 8


@dataclass(frozen=True, slots=True)
class SyntheticTokens:
    """Each sequence counts upwards in steps of its own among a few tokens, with surprises."""

    global_batch: int
    sequence: int
    vocabulary: int
    seed: int

    def batch(self, step: int, positions: Sequence[int]) -> Samples:
        number = np.asarray(positions, dtype=np.uint64) + np.uint64(step * self.global_batch)
        used = np.uint64(min(self.vocabulary, _TOKENS_USED))
        drawn = mixed(number, self.seed)
        stride = np.asarray(_STRIDES, dtype=np.uint64)[drawn >> np.uint64(62)]
        place = np.arange(self.sequence + 1, dtype=np.uint64)
        tokens = ((drawn % used)[:, None] + stride[:, None] * place) % used
        noise = mixed(number[:, None] * np.uint64(self.sequence + 1) + place, self.seed, 1)
        surprised = noise % np.uint64(_SURPRISE) == 0
        tokens[surprised] = (noise[surprised] >> np.uint64(32)) % used
        whole = tokens.astype(np.int64)
        return samples_of(whole[:, :-1], whole[:, 1:], step=step, positions=positions)


@dataclass(frozen=True, slots=True)
class SyntheticImages:
    """Each class has a coarse pattern of its own, under noise."""

    global_batch: int
    image: int
    channels: int
    classes: int
    seed: int

    def batch(self, step: int, positions: Sequence[int]) -> Samples:
        number = np.asarray(positions, dtype=np.uint64) + np.uint64(step * self.global_batch)
        labels = mixed(number, self.seed) % np.uint64(self.classes)
        edge = np.arange(self.image, dtype=np.uint64)
        cell = edge * np.uint64(_CELLS) // np.uint64(self.image)
        cells = (cell[:, None] * np.uint64(_CELLS) + cell).reshape(1, 1, self.image, self.image)
        channel = np.arange(self.channels, dtype=np.uint64).reshape(1, -1, 1, 1)
        pattern = _uniform(
            mixed(cells * np.uint64(self.channels) + channel, self.seed, 2)
            ^ mixed(labels, self.seed, 3).reshape(-1, 1, 1, 1)
        )
        pixels = np.uint64(self.channels * self.image**2)
        pixel = np.arange(int(pixels), dtype=np.uint64).reshape(1, self.channels, self.image, -1)
        noise = _uniform(mixed(number.reshape(-1, 1, 1, 1) * pixels + pixel, self.seed, 4))
        images = (pattern + noise / 2).astype(np.float32)
        return samples_of(images, labels.astype(np.int64), step=step, positions=positions)


def _uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """From -1 to 1, exactly representable."""
    return (words >> np.uint64(43)).astype(np.float64) / 2**20 - 1
