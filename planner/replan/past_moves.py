"""Corrects the predicted duration of a move by earlier moves of the cluster.

The constants of a prediction were measured elsewhere, so each phase is multiplied by the median of
measured over predicted seconds in the last moves. Planned moves and losses are kept apart, since
they leave the old plan in different ways.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

RECENT = 8
"""Number of last moves that count; older ones do not, since durations change."""
LEAST_S = 0.02
"""Least predicted seconds of a phase in a ratio, so that none is divided by 0."""
FACTOR_MAX = 50.0
WHILE_TRAINING = frozenset({"detect", "plan", "quiesce"})
"""Phases during which a job trains if its move is planned; they are not part of its downtime, and
last until new nodes are prepared."""


@dataclass(frozen=True, slots=True)
class PastMove:
    """One move: seconds by phase, measured and as predicted without any correction."""

    is_planned: bool
    predicted: tuple[tuple[str, float], ...]
    measured: tuple[tuple[str, float], ...]


def downtime_s(move: PastMove) -> float:
    """Return for how long the job did not train."""
    return sum(
        seconds
        for name, seconds in move.measured
        if not (move.is_planned and name in WHILE_TRAINING)
    )


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
