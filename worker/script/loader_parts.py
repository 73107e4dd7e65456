"""What a ``DataLoader`` of torch says: its data set, its batches and their order."""

from __future__ import annotations

from collections.abc import Mapping
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
from worker.data.datasets.blend import Blend
from worker.data.datasets.map_dataset import Collate, Dataset
from worker.data.datasets.stream import Stream


@dataclass(frozen=True, slots=True)
class LoaderParts:
    """A data set, and what its loader says about batches."""

    dataset: Dataset
    collate: Collate | None = None
    batch_size: int | None = None
    shuffled: bool = True
    drop_last: bool = False
    """Whether an epoch leaves out what would not fill a batch."""
    num_workers: int = 0
    """In how many processes each rank loads samples; 0: in a thread."""
    notes: tuple[str, ...] = ()
    """What the loader asks for and Sailor does not do."""


def data_of(given: Dataset | DataLoader[Any], place: str) -> LoaderParts:
    """Return the parts of a loader; a data set without one says nothing about batches."""
    if not isinstance(given, DataLoader):
        has_numbers = hasattr(given, "__len__") and not isinstance(given, IterableDataset)
        if not isinstance(given, Blend | Stream) and not has_numbers:
            what = f"is a {type(given).__name__}, whose samples have no numbers"
            cure = "give sailor.Stream(DATA), or a function: sailor.Stream(lambda n: DATA.skip(n))"
            raise InputError(Problem(place, what, cure))
        if isinstance(given, Mapping) and given and 0 not in given:
            names = ", ".join(str(name) for name in list(given)[:3])
            what = f"is a {type(given).__name__} of {names}, not a row of samples"
            raise InputError(Problem(place, what, f'give one of them: DATA["{next(iter(given))}"]'))
        return LoaderParts(given)
    if given.batch_size is None and given.batch_sampler is None:
        what = "is a loader with batch_size=None, whose data set makes batches itself"
        raise InputError(Problem(place, what, "give a data set of single samples"))
    if isinstance(given.dataset, IterableDataset):
        what = "is a loader of an IterableDataset, whose samples have no numbers"
        cure = "give its data set to sailor.Stream, or one with len() and samples by index"
        raise InputError(Problem(place, what, cure))
    batches: Any = given.batch_sampler
    is_plain = type(batches) is BatchSampler
    sampler = batches.sampler if is_plain else batches or given.sampler
    dataset: Any = given.dataset
    shuffled = _shuffles(sampler, len(dataset))
    if shuffled is None:
        what = (
            f"is drawn by a {type(sampler).__name__} of its own, whose order Sailor would not keep"
        )
        cure = "give the data set itself: Sailor shuffles it; repeat a sample to draw it more often"
        raise InputError(Problem(place, what, cure))
    size = batches.batch_size if is_plain else None
    notes = []
    if given.worker_init_fn is not None:
        what = "the worker_init_fn of its DataLoader is not called"
        notes.append(f"{place}: {what}: what a sample draws at random depends on its number")
    drops = is_plain and bool(batches.drop_last)
    about = dataset, given.collate_fn, size, shuffled, drops
    return LoaderParts(*about, given.num_workers, tuple(notes))


def _shuffles(sampler: Any, count: int) -> bool | None:
    """Return whether a sampler shuffles all samples; ``None``: it does something else."""
    # accelerate's draws as torch's does.
    if type(sampler) is RandomSampler or type(sampler).__name__ == "SeedableRandomSampler":
        draws_all = sampler.num_samples == len(sampler.data_source) == count
        return True if draws_all and not sampler.replacement else None
    if type(sampler) is SequentialSampler:
        return False if len(sampler.data_source) == count else None
    if type(sampler) is DistributedSampler:
        return bool(sampler.shuffle) if len(sampler.dataset) == count else None  # type: ignore[arg-type]  # torch declares no length
    return None
