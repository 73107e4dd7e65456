"""Samples of a user's own data set, by their index."""

from __future__ import annotations

import hashlib
import random
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from worker.data.batch import DIGEST_BYTES, Samples
from worker.data.shuffle import sample_numbers

T = TypeVar("T")

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
        with _own_randomness():
            items = [
                _seeded(self.seed, step, position, partial(self.dataset.__getitem__, number))
                for position, number in zip(positions, numbers, strict=True)
            ]
            first = positions[0] if len(positions) else 0
            batch = _seeded(self.seed, step, first, partial(self.collate, items))
        digests = [
            _digest(step, position, number, item)
            for position, number, item in zip(positions, numbers, items, strict=True)
        ]
        return Samples(plain(batch), None, torch.tensor(digests, dtype=torch.int64))


_drawing = threading.Lock()
"""Held while the generators of the process, which all threads share, are those of a sample."""


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Keep what a data set draws apart from other random numbers."""
    python, numbers = random.getstate(), np.random.get_state()
    with _drawing, torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)


def _seeded(seed: int, step: int, position: int, act: Callable[[], T]) -> T:
    """Call a user's code so that it draws the same for a sample on every rank that loads it."""
    place = struct.pack("<QQQ", seed, step, position)
    key = int.from_bytes(hashlib.blake2b(place, digest_size=4).digest(), "little")
    random.seed(key)
    np.random.seed(key)
    torch.manual_seed(key)
    return act()


def plain(batch: Any) -> Any:
    """Return a batch of dicts and tuples, whatever mappings and lists a collate function made."""
    if isinstance(batch, Mapping):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(plain(value) for value in batch)
    return batch


def _digest(step: int, position: int, number: int, item: Any) -> int:
    """Hash a sample's content and its place in the order."""
    digest = hashlib.blake2b(struct.pack("<QQQ", step, position, number), digest_size=DIGEST_BYTES)
    for leaf in tree_leaves(item):
        digest.update(_content(leaf))
    return int.from_bytes(digest.digest(), "little")


def _content(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes()
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
    holds_tensors = isinstance(first, list) and any(isinstance(each, Tensor) for each in first)
    if isinstance(first, tuple) or holds_tensors:
        return tuple(default_collate(list(parts)) for parts in zip(*items, strict=True))
    if isinstance(first, Tensor):
        return torch.stack(items)
    return torch.as_tensor(np.asarray(items))
