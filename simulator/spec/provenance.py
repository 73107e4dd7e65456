"""The provenance of a number: measured, interpolated or computed, with its error bar."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Source = Literal["measured", "interpolated", "analytic"]

_RANK: dict[Source, int] = {"measured": 0, "interpolated": 1, "analytic": 2}


@dataclass(frozen=True, slots=True)
class Provenance:
    """The least certain source of a number, with its relative error bar and notes."""

    source: Source
    relative_error: float
    notes: tuple[str, ...] = ()


MEASURED = Provenance("measured", 0.02)


def weakest(parts: Iterable[Provenance]) -> Provenance:
    """Return the provenance of a number computed from all of these: the least certain source.

    Its error bar is the widest, be it that of a surer source.
    """
    source, error = MEASURED.source, MEASURED.relative_error
    notes: dict[str, None] = {}
    for part in parts:
        notes.update(dict.fromkeys(part.notes))
        source = max(source, part.source, key=_RANK.__getitem__)
        error = max(error, part.relative_error)
    return Provenance(source, error, tuple(notes))
