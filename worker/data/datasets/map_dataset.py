"""Samples of a user's own data, by their number in the run."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from simulator.documents.problems import InputError, Problem
from worker.data.batch import DIGEST_BYTES, Samples
from worker.data.batch_tree import leaves_of, map_tensors
from worker.data.data_files import KEEP_DATA, DataFile, files_of
from worker.data.datasets.blend import Blend
from worker.data.datasets.stream import Stream, StreamReader
from worker.data.generator_turns import turn
from worker.data.sample_checks import ValueLimits, check_sample, refuse_texts
from worker.data.sample_order import order_text
from worker.data.shuffle import sample_numbers

T = TypeVar("T")

Collate = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """A data set with a length and samples by index: torch's, Hugging Face's, or a list."""

    def __len__(self) -> int:
        """Return how many samples there are."""

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""


Dataset = MapDataset | Blend | Stream


@dataclass(slots=True)
class MapData:
    """Batches of a user's data: each sample once per epoch, in an order of its own."""

    dataset: Dataset
    collate: Collate
    global_batch: int
    seed: int
    shuffled: bool = True
    drop_last: bool = False
    """An epoch ends with its last full batch; else batches go on into the next epoch."""
    sizes: tuple[int, ...] = ()
    """How many samples each data set had when the job began; default: as many as it has now."""
    limits: ValueLimits = field(default_factory=dict)
    """By key, the least integer that is too large; an error names a sample that reaches it."""
    name: str = "dataset"
    """What errors call it: the argument of the script."""
    _reader: StreamReader | None = None

    def __post_init__(self) -> None:
        self.sizes = self.sizes or sizes_of(self.dataset)
        if isinstance(self.dataset, Stream):
            self._reader = StreamReader(self.dataset, self.global_batch)

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The token files of all data sets."""
        blend = self.dataset.parts if isinstance(self.dataset, Blend) else ()
        data = [part.dataset for part in blend] or [self.dataset]
        return tuple(file for each in data for file in files_of(each))

    @property
    def order(self) -> str:
        """What the order of the samples depends on."""
        found: dict[str, object] = {"batch_size": self.global_batch, "seed": self.seed}
        if not isinstance(self.dataset, Stream):
            found |= {"samples": list(self.sizes)}
            found |= {"shuffle": self.shuffled, "drop_last": self.drop_last}
        if isinstance(self.dataset, Blend):
            found["weights"] = [part.weight for part in self.dataset.parts]
        return order_text(**found)

    def batches(self) -> int:
        """Return in how many batches all samples are; the last one may be smaller."""
        return -(-self.sizes[0] // self.global_batch)

    def positions_in(self, step: int, positions: Sequence[int]) -> list[int]:
        """Return those positions of a batch of the first epoch that have a sample."""
        left = self.sizes[0] - step * self.global_batch
        return [position for position in positions if position < left]

    def batch(self, step: int, positions: Sequence[int]) -> Samples:
        """Return the samples at these positions of the batch of this step."""
        self._check_sizes(step)
        with _own_randomness():
            numbers = self._numbers(step, positions)
            items = [
                self._load(step, position, part, number)
                for position, (part, number) in zip(positions, numbers, strict=True)
            ]
            first = positions[0] if len(positions) else 0
            batch = _call_seeded(self.seed, step, first, partial(self._collate, items))
        digests = [
            _digest(step, position, part, number, item)
            for position, (part, number), item in zip(positions, numbers, items, strict=True)
        ]
        return Samples(as_batch(batch), None, torch.tensor(digests, dtype=torch.int64))

    def _numbers(self, step: int, positions: Sequence[int]) -> list[tuple[int, int]]:
        """Return the data set and the index of each sample."""
        first = step * self.global_batch
        if self.drop_last:
            epoch, batch = divmod(step, self.sizes[0] // self.global_batch)
            first = epoch * self.sizes[0] + batch * self.global_batch
        if isinstance(self.dataset, Stream):
            return [(0, first + position) for position in positions]
        if isinstance(self.dataset, Blend):
            turns = [self.dataset.turn(first + position) for position in positions]
            return [(part, self._index(part, number)) for part, number in turns]
        if not self.shuffled:
            return [(0, (first + position) % self.sizes[0]) for position in positions]
        places = [first + position for position in positions]
        order = {"global_batch": self.global_batch, "count": self.sizes[0], "seed": self.seed}
        return [(0, number) for number in sample_numbers(0, places, **order).tolist()]

    def _index(self, part: int, number: int) -> int:
        """Return the index of the sample that is drawn as the ``number``-th of its data set."""
        count = self.sizes[part]
        if not self.shuffled:
            return number % count
        seed = self.seed + part
        return int(sample_numbers(number, [0], global_batch=1, count=count, seed=seed)[0])

    def _load(self, step: int, position: int, part: int, number: int) -> Any:
        name = f"{self.name} {part}" if isinstance(self.dataset, Blend) else self.name
        place = f"{name}: sample {number} (step {step}, position {position})"
        try:
            if self._reader is not None:
                item = self._reader.sample(
                    number, lambda each, act: _call_seeded(self.seed, 0, each, act)
                )
            else:
                data: Any = self.dataset
                data = data.parts[part].dataset if isinstance(data, Blend) else data
                item = _call_seeded(self.seed, step, position, partial(data.__getitem__, number))
        except InputError:
            raise
        except IndexError as error:
            what = f"cannot be read ({type(error).__name__}: {error})"
            raise InputError(Problem(place, what, KEEP_DATA)) from error
        except Exception as error:
            error.add_note(f"in {place}")
            raise
        check_sample(item, self.limits, place)
        return item

    def _collate(self, items: list[Any]) -> Any:
        if self.collate is not default_collate:
            return self.collate(items)
        try:
            return default_collate(items)
        except (RuntimeError, TypeError, ValueError) as error:
            refuse_texts(items[0], self.name)
            what = f"has samples that cannot be stacked: {error}"
            cure = "give collate=sailor.pad, or a function of your own"
            raise InputError(Problem(self.name, what, cure)) from None

    def _check_sizes(self, step: int) -> None:
        """Raise ``InputError`` if a data set has changed: the order would be another one."""
        sizes = sizes_of(self.dataset)
        if len(sizes) != len(self.sizes):
            what = f"has {len(sizes)} data sets with a length, and had {len(self.sizes)}"
            raise InputError(Problem(self.name, f"{what} when the job began", KEEP_DATA))
        for part, (now, before) in enumerate(zip(sizes, self.sizes, strict=True)):
            if now != before:
                name = f"{self.name} {part}" if len(self.sizes) > 1 else self.name
                what = f"has {now} samples at step {step}, and had {before} when the job began"
                raise InputError(Problem(name, what, KEEP_DATA))


@dataclass(frozen=True, slots=True)
class OneEpoch:
    """The first epoch of a data set, whose last batch may be smaller."""

    data: MapData

    def batch(self, step: int, positions: Sequence[int]) -> Samples:
        """Return the samples at those of these positions that have one."""
        there = self.data.positions_in(step, positions)
        none = torch.empty(0, dtype=torch.int64)
        return self.data.batch(step, there) if there else Samples(None, None, none)


def sizes_of(dataset: Dataset) -> tuple[int, ...]:
    """Return how many samples there are, of each part of a blend; none for a stream."""
    if isinstance(dataset, Stream):
        return ()
    if isinstance(dataset, Blend):
        return tuple(len(part.dataset) for part in dataset.parts)
    return (len(dataset),)


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Keep what a data set draws apart from other random numbers."""
    with turn(), torch.random.fork_rng(devices=[]):
        python, numbers = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)


def _call_seeded(seed: int, step: int, position: int, act: Callable[[], T]) -> T:
    """Call a user's code so that it draws the same for a sample on every rank that loads it."""
    place = struct.pack("<QQQ", seed, step, position)
    key = int.from_bytes(hashlib.blake2b(place, digest_size=4).digest(), "little")
    random.seed(key)
    np.random.seed(key)
    torch.default_generator.manual_seed(key)  # Without seeding devices, which takes 0.2 ms.
    return act()


def as_batch(made: Any) -> Any:
    """Return what a collate function made with tuples for lists, and few kinds of mappings."""
    return map_tensors(lambda tensor: tensor, made)


def _digest(step: int, position: int, part: int, number: int, item: Any) -> int:
    """Hash a sample's content and its place in the order."""
    place = struct.pack("<QQQ", step, position, number)
    if part:
        place += struct.pack("<Q", part)
    digest = hashlib.blake2b(place, digest_size=DIGEST_BYTES)
    for leaf in leaves_of(item):
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
        made = (default_collate(list(parts)) for parts in zip(*items, strict=True))
        return first._make(made) if hasattr(first, "_make") else tuple(made)
    if isinstance(first, Tensor):
        return torch.stack(items)
    return torch.as_tensor(np.asarray(items))
