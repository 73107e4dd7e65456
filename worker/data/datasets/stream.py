"""Samples that are read one after the other, from any of them on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from simulator.documents.problems import InputError, Problem

Seeded = Callable[[int, Callable[[], Any]], Any]
"""Seeds the random generators by a sample's number and the job's seed, then calls the function."""


class Stream:
    """Samples without a length, such as files that are read line by line.

    ``source`` is a function that returns an iterator over the samples from a given number on, or
    something that can be iterated over again and again; then samples before a position are read
    and dropped. It must give the same samples in the same order each time: every rank reads it.
    A function must draw no random numbers for the samples that it skips.
    """

    def __init__(self, source: Callable[[int], Iterable[Any]] | Iterable[Any]) -> None:
        if not callable(source):
            if not hasattr(source, "__iter__"):
                what = f"cannot be read from a {type(source).__name__}"
                raise InputError(Problem("Stream", what, _CURE))
            if iter(source) is source or inspect.isgenerator(source):
                what = f"is a {type(source).__name__}, which can be read only once"
                raise InputError(Problem("Stream", what, _CURE))
        self._source = source

    def open(self, number: int, seeded: Seeded) -> tuple[int, Iterator[Any]]:
        """Return an iterator, and the number of its first sample: at most ``number``."""
        source: Any = self._source
        if callable(source):
            return number, seeded(number, lambda: iter(source(number)))
        return 0, seeded(0, partial(iter, source))


_CURE = "give a function from a sample's number to an iterator over the samples from it on"


class StreamReader:
    """One process's place in a stream; keeps the samples of the step that is being computed."""

    def __init__(self, stream: Stream, global_batch: int) -> None:
        self._stream, self._global_batch = stream, global_batch
        self._samples: Iterator[Any] = iter(())
        self._next = -1
        self._kept: dict[int, Any] = {}

    def sample(self, number: int, seeded: Seeded) -> Any:
        """Return a sample; numbers of one step may come in any order."""
        first = number - number % self._global_batch
        self._kept = {each: item for each, item in self._kept.items() if each >= first}
        if number in self._kept:
            return self._kept[number]
        if not 0 <= self._next <= number:
            self._next, self._samples = self._stream.open(number, seeded)
        while self._next <= number:
            item = self._read(self._next, seeded)
            if self._next >= first:
                self._kept[self._next] = item
            self._next += 1
        return self._kept[number]

    def _read(self, number: int, seeded: Seeded) -> Any:
        try:
            return seeded(number, self._samples.__next__)
        except StopIteration:
            self._next = -1
            step = number // self._global_batch
            what = f"ended after {number} samples, in step {step}"
            cure = "give fewer steps, or begin again at its end"
            raise InputError(Problem("Stream", what, cure)) from None
