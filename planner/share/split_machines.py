"""Splits the machines of a cluster among several jobs by proportional fairness.

Each job names plans that it could run: the whole machines that each takes, and what it is worth.
The split runs jobs of as much weight as possible, and of these splits it takes the one with the
largest sum of weight · log(worth / worth alone on all machines). So a job gains 1 % of speed if the
others together lose less than 1 %, each by its weight; the units of worth do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, le

MachineCounts = tuple[int, ...]
"""Whole machines by pool."""

SPLITS_MAX = 20_000
"""Sums of machines that are remembered while jobs are added; above, the worst are dropped."""


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """A plan that a job could run."""

    plan: int
    machines: MachineCounts
    worth: float
    """Above 0, for example samples per second, or per dollar."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a job asks for."""

    choices: Sequence[PlanChoice]
    weight: float = 1.0
    running: PlanChoice | None = None
    """One of the choices, if the job may keep it."""
    move_share: float = 0.0
    """Share of the time until the next change that the job would lose by another choice."""

    def values(self, machines: MachineCounts) -> list[tuple[PlanChoice, float]]:
        """The choices that fit, with their parts of the sum."""
        fitting = [each for each in self.choices if all(map(le, each.machines, machines))]
        alone = max((each.worth for each in fitting), default=1.0)
        left = max(1e-3, 1 - self.move_share)
        return [
            (each, self.weight * math.log(each.worth / alone * (1.0 if stays else left)))
            for each in fitting
            for stays in (self.running is None or each == self.running,)
        ]


@dataclass(frozen=True, slots=True)
class _Split:
    """The choices of the first jobs."""

    running: float
    """Weight of the jobs that run."""
    value: float
    choices: tuple[PlanChoice | None, ...]

    @property
    def rank(self) -> tuple[float, float, tuple[bool, ...]]:
        """Larger is better; of equal splits the one that runs the earlier jobs.

        Sums are rounded, so that they are equal in any order.
        """
        runs = tuple(choice is not None for choice in self.choices)
        return round(self.running, 9), round(self.value, 9), runs


def split_machines(
    claims: Sequence[Claim], machines: MachineCounts, *, splits_max: int = SPLITS_MAX
) -> tuple[PlanChoice | None, ...]:
    """Choose a plan for each job, or none, so that together they take no more than the machines.

    It remembers the best split of the jobs so far for each sum of machines, so it is exact up to
    ``splits_max`` sums.
    """
    splits: dict[MachineCounts, _Split] = {(0,) * len(machines): _Split(0.0, 0.0, ())}
    for claim in claims:
        grown: dict[MachineCounts, _Split] = {}
        values = claim.values(machines)
        for taken, split in splits.items():
            nothing = _Split(split.running, split.value, (*split.choices, None))
            _keep_better(grown, taken, nothing)
            for choice, value in values:
                total = tuple(map(add, taken, choice.machines))
                if all(map(le, total, machines)):
                    more = split.running + claim.weight, split.value + value
                    _keep_better(grown, total, _Split(*more, (*split.choices, choice)))
        if len(grown) > splits_max:
            best = sorted(grown, key=lambda total: grown[total].rank, reverse=True)
            grown = {total: grown[total] for total in best[:splits_max]}
        splits = grown
    # Among equal splits take the one with the fewest machines.
    best_total = max(splits, key=lambda total: (splits[total].rank, -sum(total), total))
    return splits[best_total].choices


def _keep_better(splits: dict[MachineCounts, _Split], total: MachineCounts, split: _Split) -> None:
    if total not in splits or split.rank > splits[total].rank:
        splits[total] = split


def without_dominated(choices: Sequence[PlanChoice]) -> tuple[PlanChoice, ...]:
    """Drop choices that are worth no more than one that takes no more machines of any pool."""
    kept: list[PlanChoice] = []
    for choice in sorted(choices, key=lambda each: (-each.worth, sum(each.machines), each.plan)):
        if not any(all(map(le, better.machines, choice.machines)) for better in kept):
            kept.append(choice)
    return tuple(kept)
