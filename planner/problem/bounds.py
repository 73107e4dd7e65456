"""Lower bounds of a search, shared by the searches under both estimators."""

from __future__ import annotations

from dataclasses import dataclass

ROUNDING = 1e-9
"""Relative tolerance of a bound for floats that are summed in another order."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of all plans in the searched space that keep the job's limits."""

    seconds: float
    """Least seconds of an iteration."""
    objective: float
    """Least value of the objective: seconds, or dollars where the goal is cost."""


class TooManyPlansError(Exception):
    """A small case has more plans than an exhaustive search may judge."""
