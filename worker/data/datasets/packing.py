"""Documents of different lengths, packed into rows of one length."""

from __future__ import annotations

import uuid
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from simulator.documents.problems import InputError, Problem
from worker.atomic_file import replacing
from worker.data.batch import NO_LABEL


class Packed:
    """Rows of ``length`` tokens that hold whole samples of a data set.

    Samples are mappings with ``input_ids`` and, if they differ, ``labels``. A row has
    ``input_ids``, ``labels`` without one at the first token of each document, and ``position_ids``
    that begin anew there, by which models of transformers keep documents apart. With
    ``segments=True`` it also has ``segment_ids``: 1, 2, ... and 0 for padding.
    """

    def __init__(
        self,
        dataset: Any,
        length: int,
        *,
        lengths: Sequence[int] | None = None,
        cache: str | Path | None = None,
        pad_id: int = 0,
        segments: bool = False,
    ) -> None:
        """Take ``lengths`` if they are known; else read all samples once.

        ``cache`` names a file that keeps the lengths for processes that start later.
        """
        self.dataset, self.length, self._pad_id, self._segments = dataset, length, pad_id, segments
        if lengths is None:
            lengths = None if cache is None else _read_cache(Path(cache), len(dataset))
        if lengths is None:
            lengths = [len(_tokens(dataset[index], index)) for index in range(len(dataset))]
            if cache is not None:
                _write_cache(lengths, Path(cache))
        elif len(lengths) != len(dataset):
            what = f"has {len(lengths)} lengths for {len(dataset)} samples"
            raise InputError(Problem("Packed", what, "give one for each sample"))
        too_long = next((i for i, each in enumerate(lengths) if each > length), None)
        if too_long is not None:
            what = f"has {lengths[too_long]} tokens, more than a row of {length}"
            raise InputError(
                Problem(f"Packed: sample {too_long}", what, "cut it, or give longer rows")
            )
        self.rows = pack(lengths, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a row."""
        return self.row(self.documents(index), self.length)

    def documents(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """Return the tokens and labels of each document of a row."""
        found = []
        for number in self.rows[index]:
            sample = self.dataset[number]
            tokens = _tokens(sample, number)
            labels = torch.as_tensor(sample.get("labels", tokens)).clone()
            if len(labels) != len(tokens):
                what = f"has {len(labels)} labels for {len(tokens)} tokens"
                raise InputError(Problem(f"Packed: sample {number}", what, "give one for each"))
            labels[:1] = NO_LABEL
            found.append((tokens, labels))
        return found

    def row(self, documents: Sequence[tuple[Tensor, Tensor]], length: int) -> dict[str, Tensor]:
        """Put documents beside each other, and padding behind them."""
        left = length - sum(len(tokens) for tokens, _ in documents)
        if left < 0:
            what = f"has grown: its documents no longer fit into {length} tokens"
            raise InputError(Problem("Packed", what, "keep the data as it was"))
        padding = torch.full((left,), self._pad_id), torch.full((left,), NO_LABEL)
        parts = [*documents, padding]
        row = {
            "input_ids": torch.cat([tokens for tokens, _ in parts]),
            "labels": torch.cat([labels for _, labels in parts]),
            "position_ids": torch.cat([torch.arange(len(tokens)) for tokens, _ in parts]),
        }
        if self._segments:
            numbers = [*range(1, len(documents) + 1), 0]
            row["segment_ids"] = torch.cat(
                [torch.full((len(t),), n) for n, (t, _) in zip(numbers, parts, strict=True)]
            )
        return row

    def twins(self) -> tuple[dict[str, Tensor], dict[str, Tensor], int] | None:
        """Return a row, the same with another first document, and the length of that one."""
        several = next((i for i, row in enumerate(self.rows) if len(row) > 1), None)
        if several is None:
            return None
        (tokens, labels), *others = self.documents(several)
        other = torch.where(tokens == others[0][0][0], others[0][0][-1], others[0][0][0])
        rows = [self.row([(t, labels), *others], self.length) for t in (tokens, other)]
        return rows[0], rows[1], len(tokens)


def pack(lengths: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """Return which samples each row holds: the longest first, each where it fits best."""
    rows: list[list[int]] = []
    # The rows that have room, by how much and in the order in which they were begun.
    open_rows: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        place = bisect_left(open_rows, (lengths[index], 0))
        if place < len(open_rows):
            room, row = open_rows.pop(place)
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(index)
        if room > lengths[index]:
            insort(open_rows, (room - lengths[index], row))
    return [tuple(row) for row in rows]


def _read_cache(cache: Path, count: int) -> list[int] | None:
    """Read the cached lengths of ``count`` samples; ``None``: there are none."""
    try:
        with cache.open("rb") as file:
            found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    is_whole = found.ndim == 1 and len(found) == count and found.dtype == np.int64
    return found.tolist() if is_whole and bool((found > 0).all()) else None


def _write_cache(lengths: Sequence[int], cache: Path) -> None:
    """Write the lengths; several processes may do so at once, and write the same."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with replacing(cache, suffix=uuid.uuid4().hex, is_durable=False) as file:
            np.save(file, np.asarray(lengths, dtype=np.int64))
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise InputError(Problem(f"Packed: cache {cache}", what, "name another file")) from None


def _tokens(sample: Any, number: int) -> Tensor:
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        what = "is not a mapping with input_ids"
        raise InputError(Problem(f"Packed: sample {number}", what, "convert texts to tokens first"))
    tokens = torch.as_tensor(sample["input_ids"])
    if tokens.dim() != 1 or not len(tokens):
        what = "is empty" if not tokens.numel() else f"has input_ids of {tokens.dim()} dimensions"
        raise InputError(Problem(f"Packed: sample {number}", what, "give a row of token numbers"))
    mask = sample.get("attention_mask")
    if mask is not None and not bool(torch.as_tensor(mask).all()):
        what, cure = "has padding (its attention_mask has zeros)", "tokenize without padding"
        raise InputError(Problem(f"Packed: sample {number}", what, f"{cure}: rows are padded here"))
    return tokens
