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
    """Return the provenance of a number computed from all of these."""
    chosen = MEASURED
    notes: dict[str, None] = {}
    for part in parts:
        notes.update(dict.fromkeys(part.notes))
        if (_RANK[part.source], part.relative_error) > (
            _RANK[chosen.source],
            chosen.relative_error,
        ):
            chosen = part
    return Provenance(chosen.source, chosen.relative_error, tuple(notes))
