"""Checks of each sample before it is computed, which name it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from simulator.documents.problems import InputError, Problem
from worker.data.batch import NO_LABEL
from worker.data.batch_tree import parts_of

ValueLimits = Mapping[str, int]
"""The least integers that are too large, by entry of a sample: ``input_ids`` and ``labels``."""


def limits_of(module: nn.Module, *, labels: bool) -> dict[str, int]:
    """Return what a module's tokens and labels are below, as far as it declares that."""
    found = {}
    ends = [_embeddings(module, name) for name in ("input", "output")]
    if isinstance(ends[0], nn.Embedding):
        found["input_ids"] = ends[0].num_embeddings
    if labels and isinstance(ends[1], nn.Linear):
        found["labels"] = ends[1].out_features
    return found


def _embeddings(module: nn.Module, end: str) -> Any:
    """Return what a model of transformers calls the embeddings of one end; ``None``: nothing."""
    try:
        return getattr(module, f"get_{end}_embeddings", lambda: None)()
    except (AttributeError, NotImplementedError):
        return None  # Some models of images have neither, and say so.


def check_sample(item: Any, limits: ValueLimits, place: str) -> None:
    """Raise ``InputError`` if a sample is missing, empty, or outside the model's vocabulary."""
    if item is None:
        raise InputError(Problem(place, "is None", "leave it out of the data set"))
    entries = list(_entries(item))
    if entries and all(_size(value) == 0 for _, value in entries):
        raise InputError(Problem(place, "is empty", "leave it out of the data set"))
    for name, value in entries:
        if name in limits:
            _check_below(value, name, limits[name], place)


def refuse_texts(item: Any, place: str) -> None:
    """Raise ``InputError`` if entries of a sample are texts or missing: they make no tensor."""
    parts = item if isinstance(item, Mapping) else {"": item}
    names = [str(name) for name, value in parts.items() if _is_no_number(value)]
    if names == [""]:
        what, cure = "has samples that are texts", "convert them to tokens before"
    elif names:
        what = f"has samples with texts, or nothing, in {', '.join(names)}"
        cure = "leave these out (remove_columns of a Hugging Face data set), or convert them"
    else:
        return
    raise InputError(Problem(place, what, cure))


def _is_no_number(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else value
    return first is None or isinstance(first, str | bytes)


def _entries(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield a sample's tensors, arrays and lists of numbers, with their names."""
    if isinstance(item, Mapping) or is_dataclass(item):
        pairs = [(str(name), value) for name, value in (parts_of(item) or {}).items()]
    elif isinstance(item, tuple | list) and not _is_numbers(item):
        # Of a pair the second is the label, as the default loss reads it.
        names = ["", "labels"] + [""] * len(item)
        if hasattr(item, "labels"):
            names = list(getattr(item, "_fields", names))
        pairs = list(zip(names, item, strict=False))
    else:
        pairs = [("", item)]
    yield from (
        (name, value)
        for name, value in pairs
        if isinstance(value, Tensor | np.ndarray | int) or _is_numbers(value)
    )


def _size(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else int(np.size(value))


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and (not value or isinstance(value[0], int | float))


def _check_below(value: Any, name: str, limit: int, place: str) -> None:
    found = torch.as_tensor(value)
    if found.is_floating_point():
        return
    allowed = (found >= 0) & (found < limit)
    if name == "labels":
        allowed |= found == NO_LABEL
    if not bool(allowed.all()):
        wrong = int(found[~allowed].flatten()[0]) if found.dim() else int(found)
        what = f"has {wrong} in {name}, and the model's vocabulary has {limit:,} entries"
        cure = "convert the data with the model's own tokenizer"
        if name == "labels":
            cure += f"; {NO_LABEL} marks what has no label"
        raise InputError(Problem(place, what, cure))


def row_out_of_bounds(error: IndexError | RuntimeError, batch: Any) -> int | None:
    """Return which row of a batch has the label that torch refused, in a loss or as an index."""
    refused = re.search(r"(?:Target|index) (-?\d+) is out of bounds", str(error))
    if refused is None:
        return None
    for name, value in _entries(batch):
        if name == "labels" and isinstance(value, Tensor):
            rows = (
                (value == int(refused[1])).flatten(1).any(-1)
                if value.dim() > 1
                else value == int(refused[1])
            )
            return int(rows.nonzero()[0]) if bool(rows.any()) else None
    return None
