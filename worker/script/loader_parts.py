"""What a ``DataLoader`` of torch says: its data set, its batches and their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from simulator.documents.problems import InputError, Problem
from worker.data.blend import Blend
from worker.data.map_dataset import Collate, Dataset
from worker.data.stream import Stream


@dataclass(frozen=True, slots=True)
class LoaderParts:
    """A data set, and what its loader says about batches."""

    dataset: Dataset
    collate: Collate | None = None
    batch_size: int | None = None
    shuffled: bool = True


def data_of(given: Dataset | DataLoader[Any], place: str) -> LoaderParts:
    """Return the parts of a loader; a data set without one says nothing about batches."""
    if not isinstance(given, DataLoader):
        if not isinstance(given, Blend | Stream) and not hasattr(given, "__len__"):
            what = f"is a {type(given).__name__}, whose samples have no numbers"
            cure = "give sailor.Stream(DATA), or a function: sailor.Stream(lambda n: DATA.skip(n))"
            raise InputError(Problem(place, what, cure))
        return LoaderParts(given)
    if isinstance(given.dataset, IterableDataset):
        what = "is a loader of an IterableDataset, whose samples have no numbers"
        cure = "give its data set to sailor.Stream, or one with len() and samples by index"
        raise InputError(Problem(place, what, cure))
    sampler: Any = given.sampler
    if given.batch_size is None or type(given.batch_sampler) is not BatchSampler:
        sampler = given.batch_sampler
    if isinstance(sampler, RandomSampler) and not sampler.replacement:
        shuffled = True
    elif isinstance(sampler, DistributedSampler):
        shuffled = sampler.shuffle
    elif isinstance(sampler, SequentialSampler):
        shuffled = False
    else:
        what = f"is drawn by a {type(sampler).__name__}, whose order would not survive a move"
        cure = "give the data set itself: Sailor shuffles it; repeat a sample to draw it more often"
        raise InputError(Problem(place, what, cure))
    dataset: Any = given.dataset
    return LoaderParts(dataset, given.collate_fn, given.batch_size, shuffled)
