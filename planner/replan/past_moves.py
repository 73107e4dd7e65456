"""What earlier moves of a cluster took, against their prediction, corrects the next prediction.

The constants of a prediction were measured elsewhere. The same phase of a few moves says how far
off they are here: a phase is multiplied by the median of measured over predicted seconds. Planned
moves and losses are apart, as they leave the old plan in different ways.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

RECENT = 8
"""So many moves count, the last ones: what is measured changes with the cluster."""
LEAST_S = 0.02
"""A phase that is predicted as less counts as this long."""
FACTOR_MAX = 50.0
WHILE_TRAINING = frozenset({"detect", "plan", "quiesce"})
"""Phases in which a job trains if its move is planned: they may last long, until new nodes are
prepared, and are no part of its downtime."""


@dataclass(frozen=True, slots=True)
class PastMove:
    """One move: seconds by phase, measured and as predicted without any correction."""

    is_planned: bool
    predicted: tuple[tuple[str, float], ...]
    measured: tuple[tuple[str, float], ...]


def phase_factors(moves: Iterable[PastMove], *, is_planned: bool) -> Mapping[str, float]:
    """Return a factor for each phase that was measured: measured over predicted seconds."""
    ratios: dict[str, list[float]] = {}
    for move in [move for move in moves if move.is_planned == is_planned][-RECENT:]:
        measured = dict(move.measured)
        for name, seconds in move.predicted:
            if name in measured and not (is_planned and name in WHILE_TRAINING):
                ratio = measured[name] / max(seconds, LEAST_S)
                ratios.setdefault(name, []).append(min(max(ratio, 1 / FACTOR_MAX), FACTOR_MAX))
    return {name: statistics.median(each) for name, each in ratios.items()}


def corrected(predicted: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase after correction."""
    return {
        name: max(seconds, LEAST_S) * factors[name] if name in factors else seconds
        for name, seconds in predicted.items()
    }
