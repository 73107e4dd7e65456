"""A DataLoader in place of a data set says how batches are made."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from simulator.documents.problems import InputError
from worker.script.loader_parts import data_of

DATA = TensorDataset(torch.arange(10))


@pytest.mark.parametrize("shuffle", [True, False])
def test_size_collate_and_order_of_a_loader_are_taken(shuffle):
    def collate(items):
        return items

    parts = data_of(DataLoader(DATA, 4, shuffle=shuffle, collate_fn=collate), "dataset")
    assert (parts.dataset, parts.batch_size, parts.shuffled) == (DATA, 4, shuffle)
    assert parts.collate is collate


def test_a_distributed_sampler_says_whether_it_shuffles():
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0, shuffle=False)
    assert not data_of(DataLoader(DATA, 4, sampler=sampler), "dataset").shuffled


def test_drop_last_and_workers_of_a_loader_are_taken_and_how_they_begin_gets_a_note():
    given = {"drop_last": True, "num_workers": 1, "worker_init_fn": print}
    parts = data_of(DataLoader(DATA, 4, **given), "dataset")
    assert parts.drop_last
    assert parts.num_workers == 1
    assert parts.notes == (
        "dataset: the worker_init_fn of its DataLoader is not called: "
        "what a sample draws at random depends on its number",
    )
    plain = data_of(DataLoader(DATA, 4), "dataset")
    assert (plain.drop_last, plain.notes) == (False, ())


class Endless(IterableDataset):
    def __iter__(self):
        yield 1


def test_data_without_numbers_asks_for_a_stream():
    for given in (Endless(), iter([1])):
        with pytest.raises(InputError, match=r"have no numbers; give sailor\.Stream"):
            data_of(given, "dataset")


class Counted(Endless):
    def __len__(self):
        return 3


def test_an_iterable_data_set_with_a_length_asks_for_a_stream():
    with pytest.raises(InputError, match=r"have no numbers; give sailor\.Stream"):
        data_of(Counted(), "dataset")


def test_several_data_sets_by_name_are_refused_with_their_names():
    with pytest.raises(InputError, match=r'of train, test, not a row.*; .* DATA\["train"\]'):
        data_of({"train": DATA, "test": DATA}, "dataset")
    assert data_of({0: 1, 1: 2}, "dataset").dataset == {0: 1, 1: 2}


def test_a_loader_without_batches_is_refused():
    with pytest.raises(InputError, match="batch_size=None, whose data set makes batches itself"):
        data_of(DataLoader(DATA, batch_size=None), "dataset")


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (DataLoader(Endless()), "IterableDataset"),
        (DataLoader(DATA, sampler=RandomSampler(range(5))), "RandomSampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=5)), "RandomSampler"),
        (DataLoader(DATA, sampler=SequentialSampler(range(5))), "SequentialSampler"),
        (DataLoader(DATA, sampler=DistributedSampler(range(5), 2, 0)), "DistributedSampler"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 10, 10)), "WeightedRandomSampler"),
        (DataLoader(DATA, batch_sampler=[[1, 2], [3]]), "list"),
    ],
)
def test_an_order_of_its_own_is_refused_by_name(loader, named):
    with pytest.raises(InputError, match=named):
        data_of(loader, "dataset")
