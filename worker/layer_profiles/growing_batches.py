"""Which micro batches are measured: growing ones, until one does not fit or the time is used up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class DoesNotFitError(Exception):
    """The device has too little memory for what was tried; the message says how much is lacking."""


@dataclass(frozen=True, slots=True)
class GrowingBatches(Generic[T]):
    """The measurements of growing micro batches, and where they ended."""

    found: tuple[tuple[int, T], ...]
    too_large: int | None = None
    """The first micro batch that did not fit."""
    why: str = ""
    untried: tuple[int, ...] = ()
    """Micro batches for which there was no time."""


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on, up to ``most``."""
    return tuple(2**n for n in range(most.bit_length()) if 2**n <= most)


def measure_growing(
    sizes: Sequence[int],
    measure: Callable[[int, float], T],
    *,
    now: Callable[[], float],
    until_s: float,
) -> GrowingBatches[T]:
    """Measure growing micro batches; the first one is measured even without time.

    ``measure`` gets a micro batch and the time until which it may take samples: an equal share of
    what is left. It raises ``DoesNotFitError`` if the device has too little memory.
    """
    found: list[tuple[int, T]] = []
    for index, size in enumerate(sizes):
        left = until_s - now()
        if index > 0 and left <= 0:
            return GrowingBatches(tuple(found), untried=tuple(sizes[index:]))
        try:
            found.append((size, measure(size, now() + max(left, 0) / (len(sizes) - index))))
        except DoesNotFitError as error:
            return GrowingBatches(tuple(found), too_large=size, why=str(error))
    return GrowingBatches(tuple(found))
