"""Splits a cluster, as it is up now, among several jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import floordiv

from planner.library.plan_library import KnownPlan, PlanLibrary, Search, learn
from planner.problem.question import Question
from planner.share.part_search import SharingJob, guess_parts, idle_machines, improve_split
from planner.share.split_machines import MachineCounts


@dataclass(frozen=True, slots=True, eq=False)
class JobPart:
    """What one job gets."""

    plans: PlanLibrary
    weight: float
    machines: MachineCounts
    """Its machines by pool; none if it has to wait."""
    known: KnownPlan | None
    """Its plan on them."""
    alone: KnownPlan | None
    """Its plan on the whole cluster; ``None``: it has none."""

    @property
    def of_alone(self) -> float:
        """Its samples per second, as a share of those on the whole cluster."""
        if self.known is None or self.alone is None:
            return 0.0
        alone = self.alone.estimate.throughput_samples_per_s
        return self.known.estimate.throughput_samples_per_s / alone


@dataclass(frozen=True, slots=True, eq=False)
class SharedCluster:
    """Which job gets what."""

    parts: tuple[JobPart, ...]
    idle: MachineCounts
    """Machines that no plan takes."""

    @property
    def together(self) -> float:
        """The work of all jobs, in clusters that run one job alone."""
        return sum(part.of_alone for part in self.parts)


def share_cluster(
    questions: Sequence[Question], weights: Sequence[float], search: Search, *, searches: int
) -> SharedCluster:
    """Split the machines of a cluster among jobs; for each job up to ``searches`` plans are made.

    The first is for the whole cluster; half of the others are for parts that are guessed, the rest
    improves the split.
    """
    jobs, gpus = [], tuple(pool.gpus for pool in questions[0].cluster.pools)
    sizes = [pool.gpus_per_machine for pool in questions[0].cluster.pools]
    machines = tuple(map(floordiv, gpus, sizes))
    for question, weight in zip(questions, weights, strict=True):
        plans = PlanLibrary(question)
        plans.state(gpus)
        learn(plans, gpus, search)
        jobs.append(SharingJob(plans, weight))
    guess_parts(jobs, [machines], search, 1 + (searches - 1) // 2)
    split = improve_split(jobs, machines, search, searches)
    parts = []
    for job, choice in zip(jobs, split, strict=True):
        known, plans = job.plans.known, job.plans
        alone = plans.best(plans.state(gpus))
        parts.append(
            JobPart(
                plans,
                job.weight,
                (0,) * len(machines) if choice is None else choice.machines,
                None if choice is None else known[choice.plan],
                None if alone is None else known[alone],
            )
        )
    return SharedCluster(tuple(parts), idle_machines(split, machines))
