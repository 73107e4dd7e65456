"""Samples of a user's own data set, by their index."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from worker.data.batch import DIGEST_BYTES, Samples
from worker.data.shuffle import sample_numbers

Collate = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """A data set with a length and samples by index: torch's, Hugging Face's, or a list."""

    def __len__(self) -> int:
        """Return how many samples there are."""

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""


@dataclass(frozen=True, slots=True)
class MapData:
    """Batches of a user's data set: each sample once per epoch, in an order of its own."""

    dataset: MapDataset
    collate: Collate
    global_batch: int
    seed: int
    shuffled: bool = True

    def batches(self) -> int:
        """Return in how many batches all samples are; the last one may be smaller."""
        return -(-len(self.dataset) // self.global_batch)

    def positions_in(self, step: int, positions: Sequence[int]) -> list[int]:
        """Return those positions of a batch of the first epoch that have a sample."""
        left = len(self.dataset) - step * self.global_batch
        return [position for position in positions if position < left]

    def batch(self, step: int, positions: Sequence[int]) -> Samples:
        """Return the samples at these positions of the batch of this step."""
        count = len(self.dataset)
        if self.shuffled:
            numbers = sample_numbers(
                step, positions, global_batch=self.global_batch, count=count, seed=self.seed
            ).tolist()
        else:
            numbers = [(step * self.global_batch + position) % count for position in positions]
        items = [self.dataset[number] for number in numbers]
        digests = [
            _digest(step, position, number, item)
            for position, number, item in zip(positions, numbers, items, strict=True)
        ]
        return Samples(self.collate(items), None, torch.tensor(digests, dtype=torch.int64))


def _digest(step: int, position: int, number: int, item: Any) -> int:
    """Hash a sample's content and its place in the order."""
    digest = hashlib.blake2b(struct.pack("<QQQ", step, position, number), digest_size=DIGEST_BYTES)
    for leaf in tree_leaves(item):
        digest.update(_content(leaf))
    return int.from_bytes(digest.digest(), "little")


def _content(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, (np.ndarray, np.generic)) or hasattr(leaf, "tobytes"):
        content: bytes = leaf.tobytes()
        return content
    return repr(leaf).encode()


def default_collate(items: list[Any]) -> Any:
    """Stack samples to a batch: each tensor gets a first dimension for the samples.

    Lists of numbers become tensors. Samples of different lengths need a ``collate`` of their own.
    """
    first = items[0]
    if isinstance(first, Mapping):
        return {key: default_collate([item[key] for item in items]) for key in first}
    if isinstance(first, tuple):
        return tuple(default_collate(list(parts)) for parts in zip(*items, strict=True))
    if isinstance(first, Tensor):
        return torch.stack(items)
    return torch.as_tensor(np.asarray(items))
