"""Samples from a token file: consecutive pieces of one long text, shuffled by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulator.documents.problems import InputError, Problem
from worker.data.batch import Samples, samples_of
from worker.data.data_files import DataFile, data_file
from worker.data.shuffle import sample_numbers
from worker.data.sources.npy import open_array

TokenArray = NDArray[np.uint16] | NDArray[np.uint32]

_CONVERT = (
    "make one with `python -m worker convert-tokens TEXT --out FILE`, or of a file of bare numbers "
    "with numpy.save(FILE, numpy.fromfile(BARE, numpy.uint16))"
)
CHECKED_AT_ONCE = 2**28
"""Number of tokens that are checked when a file is opened: at most a few seconds' work."""
_CHUNK = 2**24


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A long text as tokens; sample i is the i-th piece of ``sequence`` tokens."""

    name: str
    tokens: TokenArray
    global_batch: int
    sequence: int
    vocabulary: int
    seed: int
    files: tuple[DataFile, ...] = ()

    @property
    def count(self) -> int:
        """Return how many samples there are; each also needs the token after its last one."""
        return (len(self.tokens) - 1) // self.sequence

    def batch(self, step: int, positions: Sequence[int]) -> Samples:
        for each in self.files:
            each.check()
        numbers = sample_numbers(
            step, positions, global_batch=self.global_batch, count=self.count, seed=self.seed
        )
        rows = np.empty((len(numbers), self.sequence + 1), dtype=np.int64)
        for row, number in zip(rows, numbers, strict=True):
            first = int(number) * self.sequence
            row[:] = self.tokens[first : first + self.sequence + 1]
            if row.max() >= self.vocabulary:
                raise InputError(self._out_of_vocabulary(first))
        return samples_of(rows[:, :-1], rows[:, 1:], step=step, positions=positions)

    def check(self, *, end: int) -> None:
        """Raise ``InputError`` if a token before ``end`` is outside the vocabulary."""
        for first in range(0, min(len(self.tokens), end), _CHUNK):
            if self.tokens[first : min(first + _CHUNK, end)].max() >= self.vocabulary:
                raise InputError(self._out_of_vocabulary(first))

    def _out_of_vocabulary(self, first: int) -> Problem:
        """Name the first token outside the vocabulary from ``first`` on."""
        chunk = self.tokens[first : first + _CHUNK]
        place = first + int(np.argmax(chunk >= self.vocabulary))
        return Problem(
            self.name,
            f"token {place} is {self.tokens[place]}, outside the model's vocabulary of "
            f"{self.vocabulary}",
            "convert the text with the model's own vocabulary, or train a model of a larger one",
        )


def open_tokens(
    path: Path,
    *,
    global_batch: int,
    sequence: int,
    vocabulary: int,
    seed: int,
    checked: int = CHECKED_AT_ONCE,
) -> TokenFile:
    """Map a token file into memory; ``InputError`` says what is wrong with it."""
    array = open_token_array(path, at_least=sequence + 1)
    files = (data_file(path),)
    file = TokenFile(path.name, array, global_batch, sequence, vocabulary, seed, files)
    file.check(end=checked)
    return file


def open_token_array(path: Path, *, at_least: int) -> TokenArray:
    """Map the tokens of a file into memory."""
    array = open_array(path, cure=_CONVERT)
    if array.ndim != 1 or array.dtype not in (np.uint16, np.uint32):
        what = f"holds {array.ndim}-dimensional {array.dtype}, not a row of uint16 or uint32"
        raise InputError(Problem(path.name, what, _CONVERT))
    if len(array) < at_least:
        what = f"holds {len(array)} tokens, fewer than the {at_least} of one sample"
        raise InputError(Problem(path.name, what, "give a longer text or train on shorter samples"))
    return array
