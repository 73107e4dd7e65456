"""A collate function for samples of different lengths."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from simulator.documents.problems import InputError, Problem
from worker.data.batch import NO_LABEL
from worker.data.sample_checks import refuse_texts

_MASK = "attention_mask"


def pad(items: Sequence[Any], *, pad_id: int = 0, length: int | None = None) -> dict[str, Tensor]:
    """Make a batch of mappings; shorter samples are padded behind their end.

    ``labels`` are padded by -100, ``input_ids`` by ``pad_id``, everything else by 0. A missing
    ``attention_mask`` is made. All micro batches get this ``length``, if it is given; dropout then
    does not depend on which samples are computed together.
    """
    if not all(isinstance(item, Mapping) for item in items):
        what = f"got a {type(items[0]).__name__}"
        raise InputError(Problem("sailor.pad", what, 'give mappings, such as {"input_ids": ...}'))
    for item in items:
        refuse_texts(item, "sailor.pad")
    columns = {name: [torch.as_tensor(item[name]) for item in items] for name in items[0]}
    if "input_ids" in columns and _MASK not in columns:
        columns[_MASK] = [torch.ones_like(each) for each in columns["input_ids"]]
    fills = {"labels": NO_LABEL, "input_ids": pad_id}
    return {
        name: _stack(values, fills.get(name, 0), length, name) for name, values in columns.items()
    }


def _stack(values: list[Tensor], fill: int, length: int | None, name: str) -> Tensor:
    if values[0].dim() == 0:
        return torch.stack(values)
    longest = max(len(each) for each in values)
    if length is not None and longest > length:
        what = f"got {longest} {name}, more than the length of {length}"
        raise InputError(Problem("sailor.pad", what, "cut samples, or give a larger length"))
    size = longest if length is None else length
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in values))
    batch = values[0].new_full((len(values), size, *values[0].shape[1:]), fill, dtype=dtype)
    for row, each in zip(batch, values, strict=True):
        row[: len(each)] = each
    return batch
