"""Batches keep their type where code reads them by attributes."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from worker.data.batch_tree import leaves_of, map_tensors
from worker.data.datasets.map_dataset import default_collate


class Pair(NamedTuple):
    x: Any
    labels: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    name: str = "sample"


@dataclass(slots=True)
class Slots:
    x: Any
    inner: Frozen = field(default_factory=lambda: Frozen(torch.ones(2)))


class Encoding(UserDict):
    """Reads its entries as attributes, as a BatchEncoding of transformers does."""

    def __getattr__(self, name):
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


ONES = torch.ones(2)
KEPT = [
    Pair(ONES, (ONES, 3)),
    Frozen(ONES),
    Slots({"a": ONES}),
    Encoding({"x": ONES, "text": "words"}),
    {"x": ONES, "none": None},
    (ONES, ONES, 3),
    ONES,
]


@pytest.mark.parametrize("given", KEPT, ids=lambda each: type(each).__name__)
def test_tensors_are_changed_wherever_they_are_and_nothing_else(given):
    before = list(leaves_of(given))
    changed = map_tensors(lambda tensor: tensor + 1, given)
    assert type(changed) is type(given)
    assert any(isinstance(leaf, torch.Tensor) for leaf in before)
    for old, new in zip(before, leaves_of(changed), strict=True):
        if isinstance(old, torch.Tensor):
            assert (old.tolist(), new.tolist()) == ([1.0, 1.0], [2.0, 2.0])
        else:
            assert new == old


def test_parts_are_found_under_their_names_again():
    assert map_tensors(torch.neg, Pair(ONES, 3)).x.tolist() == [-1.0, -1.0]
    assert map_tensors(torch.neg, Slots(3)).inner.x.tolist() == [-1.0, -1.0]
    assert map_tensors(torch.neg, Encoding(x=ONES)).x.tolist() == [-1.0, -1.0]


def test_lists_become_tuples_and_other_mappings_dicts():
    assert map_tensors(torch.neg, [1, [2]]) == (1, (2,))
    assert type(map_tensors(torch.neg, OrderedDict(a=ONES))) is dict


def test_named_tuples_are_stacked_to_one():
    stacked = default_collate([Pair(ONES, 1), Pair(ONES, 2)])
    assert type(stacked) is Pair
    assert stacked.x.shape == (2, 2)
    assert stacked.labels.tolist() == [1, 2]
