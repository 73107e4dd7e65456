"""Synthetic samples that a model can learn, without a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.data.batch import Samples, samples_of
from worker.data.shuffle import random_words

_TOKENS_USED = 64
_STRIDES = (1, 3, 5, 7)
# One token in 16 is random, so that the loss never reaches 0.
_SURPRISE = 16
_CELLS = 8


@dataclass(frozen=True, slots=True)
class SyntheticTokens:
    """Each sequence counts up among a few tokens with its own stride, with some random tokens."""

    global_batch: int
    sequence: int
    vocabulary: int
    seed: int

    def batch(self, step: int, positions: Sequence[int]) -> Samples:
        number = np.asarray(positions, dtype=np.uint64) + np.uint64(step * self.global_batch)
        used = np.uint64(min(self.vocabulary, _TOKENS_USED))
        drawn = random_words(number, self.seed)
        stride = np.asarray(_STRIDES, dtype=np.uint64)[drawn >> np.uint64(62)]
        place = np.arange(self.sequence + 1, dtype=np.uint64)
        tokens = ((drawn % used)[:, None] + stride[:, None] * place) % used
        noise = random_words(number[:, None] * np.uint64(self.sequence + 1) + place, self.seed, 1)
        surprised = noise % np.uint64(_SURPRISE) == 0
        tokens[surprised] = (noise[surprised] >> np.uint64(32)) % used
        whole = tokens.astype(np.int64)
        return samples_of(whole[:, :-1], whole[:, 1:], step=step, positions=positions)


@dataclass(frozen=True, slots=True)
class SyntheticImages:
    """Each class has its own coarse pattern, under noise."""

    global_batch: int
    image: int
    channels: int
    classes: int
    seed: int

    def batch(self, step: int, positions: Sequence[int]) -> Samples:
        number = np.asarray(positions, dtype=np.uint64) + np.uint64(step * self.global_batch)
        labels = random_words(number, self.seed) % np.uint64(self.classes)
        cells = np.arange(_CELLS**2, dtype=np.uint64).reshape(1, 1, _CELLS, _CELLS)
        channel = np.arange(self.channels, dtype=np.uint64).reshape(1, -1, 1, 1)
        pattern = _uniform(
            random_words(cells * np.uint64(self.channels) + channel, self.seed, 2)
            ^ random_words(labels, self.seed, 3).reshape(-1, 1, 1, 1)
        )
        cell = np.arange(self.image) * _CELLS // self.image
        pattern = pattern[:, :, cell[:, None], cell]
        pixels = np.uint64(self.channels * self.image**2)
        pixel = np.arange(int(pixels), dtype=np.uint64).reshape(1, self.channels, self.image, -1)
        noise = _uniform(random_words(number.reshape(-1, 1, 1, 1) * pixels + pixel, self.seed, 4))
        images = pattern + noise / 2
        return samples_of(images, labels.astype(np.int64), step=step, positions=positions)


def _uniform(words: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Return numbers from -1 to 1 that are exactly representable, as is a sum with half of one."""
    return (words >> np.uint64(43)).astype(np.float32) / np.float32(2**20) - np.float32(1)
