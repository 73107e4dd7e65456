"""Searches plans for parts of a cluster, so that a split of it has something to choose from.

Which parts will matter is not known beforehand. So a few are guessed, then the best split so far is
improved: each job is searched with the machines that stay idle, and with one machine more or less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from operator import add, mul, sub

from planner.library.plan_library import PlanLibrary, Search, learn
from planner.share.split_machines import (
    Claim,
    MachineCounts,
    PlanChoice,
    split_machines,
    without_dominated,
)

PARTS = (1 / 2, 1 / 4, 3 / 4, 1 / 8, 3 / 8, 5 / 8, 7 / 8)
"""Parts of the cluster that are guessed."""


@dataclass(frozen=True, slots=True, eq=False)
class SharingJob:
    """A job that shares the cluster."""

    plans: PlanLibrary
    weight: float

    def choices(self) -> tuple[PlanChoice, ...]:
        """Its plans, without those that another plan matches with no more machines."""
        return without_dominated(
            [
                PlanChoice(plan, self.plans.whole_machines(plan), worth)
                for plan, worth in enumerate(worths(self.plans))
            ]
        )

    def learn(self, machines: MachineCounts, search: Search, searches: int) -> bool:
        """Search a plan for some machines; ``False``: searched before, or no searches are left."""
        gpus = tuple(map(mul, machines, (pool.gpus_per_machine for pool in self.plans.pools)))
        if not any(gpus) or gpus in self.plans.states or self.plans.searched >= searches:
            return False
        self.plans.state(gpus)
        learn(self.plans, gpus, search)
        return True


def worths(plans: PlanLibrary) -> list[float]:
    """Samples per second of each plan, or per dollar if the goal is cost and any plan costs some.

    A free plan counts as costing a thousandth of the cheapest that is not free.
    """
    figures = plans.figures()
    paid = [known.score("cost")[0] for known in plans.known]
    least = min(filter(None, paid), default=0.0)
    if plans.goal != "cost" or not least:
        return [each.rate for each in figures]
    pairs = zip(figures, paid, strict=True)
    return [each.samples / max(usd, least / 1000) for each, usd in pairs]


def best_split(
    jobs: Sequence[SharingJob], machines: MachineCounts
) -> tuple[PlanChoice | None, ...]:
    """Split the machines among jobs that do not run yet, with the known plans."""
    return split_machines([Claim(job.choices(), job.weight) for job in jobs], machines)


def guess_parts(
    jobs: Sequence[SharingJob], likely: Sequence[MachineCounts], search: Search, searches: int
) -> None:
    """Search parts that jobs may get of the machines that are up, the likeliest first."""
    total = sum(job.weight for job in jobs)
    for job in jobs:
        for part in _parts(likely, job.weight / total):
            job.learn(part, search, searches)


def improve_split(
    jobs: Sequence[SharingJob], machines: MachineCounts, search: Search, searches: int
) -> tuple[PlanChoice | None, ...]:
    """Split the machines, and search until no other plan for one machine more or less helps.

    Each job gets at most ``searches`` searches, earlier ones included.
    """
    while True:
        split = best_split(jobs, machines)
        wanted = [_neighbours(own, idle_machines(split, machines), machines) for own in split]
        # A list, not ``any``: all searches run, since each may change the next split.
        news = [
            job.learn(part, search, searches)
            for job, parts in zip(jobs, wanted, strict=True)
            for part in parts
        ]
        if not any(news):
            return split


def idle_machines(split: Iterable[PlanChoice | None], machines: MachineCounts) -> MachineCounts:
    """The machines that no job of a split takes."""
    left = machines
    for choice in split:
        if choice is not None:
            left = tuple(map(sub, left, choice.machines))
    return left


def _neighbours(
    own: PlanChoice | None, idle: MachineCounts, machines: MachineCounts
) -> Iterator[MachineCounts]:
    """The parts to search next for a job, given its part of a split."""
    has = (0,) * len(machines) if own is None else own.machines
    yield tuple(map(add, has, idle))
    for more in (1, -1):
        for pool, count in enumerate(has):
            if 0 <= count + more <= machines[pool]:
                yield (*has[:pool], count + more, *has[pool + 1 :])


def _parts(likely: Sequence[MachineCounts], share: float) -> Iterator[MachineCounts]:
    """Parts that a job of this share of all weights may get, the likelier first."""

    def part(
        machines: MachineCounts, share: float, to_whole: Callable[[float], int]
    ) -> MachineCounts:
        return tuple(to_whole(share * count) for count in machines)

    by_weight = (
        part(machines, share, to_whole)
        for machines in likely
        for to_whole in (math.floor, math.ceil)
    )
    most = tuple(max(column) for column in zip(*likely, strict=True))
    each_pool = [
        tuple(count if pool == only else 0 for pool, count in enumerate(most))
        for only in range(len(most))
    ]
    of_pools = (part(each, share, round) for share in (1, *PARTS) for each in (most, *each_pool))
    pairs = zip_longest(by_weight, of_pools)
    return (machines for machines in chain.from_iterable(pairs) if machines is not None)
