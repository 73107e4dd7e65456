"""The objective: a plan's score, and which of the job's limits it keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from simulator.arrays import Floats
from simulator.spec.job import Objective

_Figure = TypeVar("_Figure", float, Floats)

NO_MONEY_LIMITS: dict[str, Any] = dict.fromkeys(
    ("max_usd_per_iteration", "max_usd_per_hour", "max_usd_total")
)
"""What to replace in an objective to ignore its limits in dollars."""
FREE_USD_PER_HOUR = 1e-12
"""Price of what costs nothing, so that free plans are ranked by time and prices divide."""
ROUGH_TOLERANCE = 1.15
"""Factor by which rough figures may break a limit before a plan is dropped: those of the paper's
formula, which rounding to whole layers changes little."""
DRAFT_BREACH = 40.0
"""Penalty slope for limits that a draft breaks. Its figures are rougher, as they leave out what
overlaps, and prove nothing: it is ranked lower, never dropped."""


@dataclass(frozen=True, slots=True)
class LimitedFigures:
    """The figures of a plan that limits apply to."""

    seconds: float
    usd: float | None
    """Dollars of one iteration, egress included; ``None`` where a price is unknown."""
    spot_share: float


@dataclass(frozen=True, slots=True)
class Breach:
    """A limit that a plan breaks, with the value that would allow the plan."""

    limit: str
    allowed: float
    needed: float

    @property
    def excess(self) -> float:
        """Factor between the allowed and the needed value; at least 1."""
        low, high = sorted((self.allowed, self.needed))
        return high / low if low > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Limits:
    """The objective with all its limits. A lower score is better."""

    objective: Objective
    steps: int | None = None
    seconds_left: float | None = None
    """Seconds until the job's deadline, if it has one."""

    @property
    def goal_is_cost(self) -> bool:
        """Whether dollars are minimised rather than seconds."""
        return self.objective.goal == "cost"

    @property
    def needs_prices(self) -> bool:
        """Whether the goal or a limit counts dollars."""
        return self.goal_is_cost or self.caps_dollars

    @property
    def caps_dollars(self) -> bool:
        """Whether a limit counts dollars."""
        return any(getattr(self.objective, name) is not None for name in NO_MONEY_LIMITS)

    def money(self, seconds: float, usd: float) -> Iterator[tuple[str, float, float]]:
        """The limits in dollars: name, the value of a plan, and the most that is allowed."""
        values = (usd, usd / seconds * 3600, usd * (self.steps or 0))
        for name, value in zip(NO_MONEY_LIMITS, values, strict=True):
            allowed = getattr(self.objective, name)
            if allowed is not None:
                yield name, value, allowed

    def score(self, figures: LimitedFigures) -> tuple[float, float] | None:
        """The objective, then the tie-breaker: lower is better.

        ``None``: it breaks a limit, or dollars count and its price is unknown.
        """
        if next(self.breaches(figures), None) is not None:
            return None
        if figures.usd is None and self.needs_prices:
            return None  # Without a price it cannot be compared, or its limits not be checked.
        if self.goal_is_cost:
            assert figures.usd is not None
            return figures.usd, figures.seconds
        return figures.seconds, figures.usd if figures.usd is not None else 0.0

    def breaches(self, figures: LimitedFigures) -> Iterator[Breach]:
        """The limits that a plan with these figures breaks."""
        o, seconds = self.objective, figures.seconds
        if figures.usd is not None:
            for name, value, allowed in self.money(seconds, figures.usd):
                if value > allowed:
                    yield Breach(name, allowed, value)
        if o.min_iterations_per_s is not None and seconds * o.min_iterations_per_s > 1:
            yield Breach("min_iterations_per_s", o.min_iterations_per_s, 1 / seconds)
        if self.seconds_left is not None and self.steps is not None:
            total = seconds * self.steps
            if total > self.seconds_left:
                yield Breach("deadline", self.seconds_left, total)
        if o.max_spot_share is not None and figures.spot_share > o.max_spot_share + 1e-12:
            yield Breach("max_spot_share", o.max_spot_share, figures.spot_share)

    def relaxed(self) -> Iterator[Limits]:
        """Easier questions whose answers may keep all limits: what is limited becomes the goal."""
        o = self.objective
        if not self.goal_is_cost and (self.usd_max is not None or o.max_usd_per_hour is not None):
            yield replace(self, objective=replace(o, goal="cost", **NO_MONEY_LIMITS))
        if self.goal_is_cost and self.seconds_max is not None:
            quick = replace(o, goal="throughput", min_iterations_per_s=None, deadline=None)
            yield replace(self, objective=quick, seconds_left=None)

    def capped(
        self, seconds: _Figure, usd: _Figure, usd_per_hour: _Figure
    ) -> list[tuple[_Figure, float]]:
        """The figures that a limit caps, each with the most that it allows."""
        limits = (
            (usd, self.usd_max),
            (usd_per_hour, self.objective.max_usd_per_hour),
            (seconds, self.seconds_max),
        )
        return [(value, most) for value, most in limits if most is not None]

    def draft_score(self, seconds: float, usd_per_hour: float) -> float:
        """The objective of a draft's figures, penalised for the limits that they break."""
        usd = usd_per_hour / 3600 * seconds
        score = usd if self.goal_is_cost else seconds
        for value, most in self.capped(seconds, usd, usd_per_hour):
            if value > most:
                score *= 1 + DRAFT_BREACH * (value / max(most, 1e-12) - 1)
        return score

    @property
    def usd_max(self) -> float | None:
        """The most dollars that an iteration may cost."""
        o = self.objective
        total = o.max_usd_total / self.steps if o.max_usd_total is not None and self.steps else None
        return pick_tightest(o.max_usd_per_iteration, total)

    @property
    def seconds_max(self) -> float | None:
        """The most seconds that an iteration may take."""
        pace, left = self.objective.min_iterations_per_s, self.seconds_left
        by_deadline = left / self.steps if left is not None and self.steps else None
        return pick_tightest(1 / pace if pace else None, by_deadline)


@dataclass(frozen=True, slots=True)
class ObjectiveArrays:
    """The objective of many plans at once, from seconds, dollars per second and egress dollars."""

    limits: Limits

    def exact(self, seconds: Floats, usd_per_s: Floats, egress_usd: Floats) -> Floats:
        """The objective; infinite where a limit is broken."""
        possible = np.isfinite(seconds)
        finite = np.where(possible, seconds, 1.0)
        usd = finite * usd_per_s + egress_usd
        for value, most in self.limits.capped(finite, usd, _usd_per_hour(finite, usd)):
            possible = possible & (value <= most)
        found: Floats = np.where(possible, usd if self.limits.goal_is_cost else seconds, np.inf)
        return found

    def rough(self, seconds: Floats, usd_per_s: Floats) -> Floats:
        """The objective of rough figures: a slightly broken limit is penalised, not excluded."""
        if not self.limits.needs_prices and self.limits.seconds_max is None:
            return seconds
        possible = np.isfinite(seconds)
        finite = np.where(possible, seconds, 1.0)
        usd = finite * np.maximum(usd_per_s, FREE_USD_PER_HOUR / 3600)
        score = usd if self.limits.goal_is_cost else finite
        for value, most in self.limits.capped(finite, usd, _usd_per_hour(finite, usd)):
            possible = possible & (value <= most * ROUGH_TOLERANCE)
            excess = np.minimum(value, most * ROUGH_TOLERANCE) / max(most, 1e-12)
            score = score * np.maximum(1.0, excess) ** 2
        found: Floats = np.where(possible, score, np.inf)
        return found


def pick_tightest(*limits: float | None) -> float | None:
    """Return the least of several upper limits; ``None``: there is no limit."""
    return min((limit for limit in limits if limit is not None), default=None)


def _usd_per_hour(seconds: Floats, usd: Floats) -> Floats:
    hourly: Floats = usd / np.maximum(seconds, 1e-12) * 3600
    return hourly
