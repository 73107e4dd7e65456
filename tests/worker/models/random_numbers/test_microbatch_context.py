"""A batch reaches its device whole: what the model takes in its type, and targets in theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from worker.data.batch_tree import leaves_of
from worker.models.random_numbers.microbatch_context import batch_on_device


class Pair(NamedTuple):
    x: Any
    labels: Any


@dataclass
class Batch:
    x: Any
    labels: Any


X, LABELS = torch.ones(2, 3), torch.ones(2)
BATCHES = [Pair(X, LABELS), Batch(X, LABELS), {"x": X, "labels": LABELS}, (X, LABELS)]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda each: type(each).__name__)
def test_all_tensors_are_moved_and_targets_keep_their_type(batch):
    about = {"of_module": True, "dtype": torch.bfloat16, "device": torch.device("meta")}
    moved = batch_on_device(batch, **about)
    assert type(moved) is type(batch)
    x, labels = leaves_of(moved)
    assert (x.device.type, x.dtype) == ("meta", torch.bfloat16)
    assert (labels.device.type, labels.dtype) == ("meta", torch.float32)


def test_what_is_inside_of_the_first_entry_is_converted_but_for_its_labels():
    inside = {"x": X, "labels": LABELS}
    about = {"of_module": True, "dtype": torch.bfloat16, "device": torch.device("cpu")}
    first, second = batch_on_device((inside, X), **about)
    assert [first["x"].dtype, first["labels"].dtype] == [torch.bfloat16, torch.float32]
    assert second.dtype == torch.float32
