"""Replays several jobs on one trace: at once on parts of the cluster, and one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import floordiv

from planner.library.plan_library import PlanLibrary, Search
from planner.problem.question import Question
from planner.replay.policies import CheckpointIntervals, SailorPolicy
from planner.replay.shared_pool import (
    Divide,
    OneAfterAnother,
    RunningShare,
    SideBySide,
    spans_by_job,
)
from planner.replay.trace_plans import plans_for
from planner.share.part_search import SharingJob, guess_parts, improve_split
from simulator.traces.play_types import (
    NO_LIMITS,
    PlanFigures,
    PolicyResult,
    ReconfigurationCosts,
    RunLimits,
)
from simulator.traces.player import play
from simulator.traces.trace import LostSlots, Trace

SHARE, LINE = "share", "line"
WAYS = (SHARE, LINE)
"""Jobs run at once by weight, or one after another in the order of arrival."""


@dataclass(frozen=True, slots=True, eq=False)
class JobOfMany:
    """A job, with its plans on the trace."""

    plans: PlanLibrary
    figures: tuple[PlanFigures, ...]
    weight: float
    begins_s: float = 0.0
    """When it arrives."""

    @property
    def limits(self) -> RunLimits:
        """When the job ends before the trace."""
        job = self.plans.question.job
        return RunLimits(job.steps, job.objective.max_usd_total)


@dataclass(frozen=True, slots=True, eq=False)
class SeveralJobs:
    """The results of several jobs on a trace."""

    trace: Trace
    jobs: tuple[JobOfMany, ...]
    alone: tuple[float, ...]
    """Samples per second of each job that has the whole cluster for the whole trace."""
    ways: dict[str, tuple[PolicyResult, ...]]
    meanwhile: dict[str, tuple[float, ...]]
    """By way, samples of each job alone, from its arrival until its end in that way."""

    def of_alone(self, way: str) -> list[float]:
        """Samples of each job, as a share of what it does alone in the same time."""
        return [
            result.samples / alone if alone else 0.0
            for result, alone in zip(self.ways[way], self.meanwhile[way], strict=True)
        ]

    def together(self, way: str) -> float:
        """Work of all jobs from first arrival to last end, in clusters that run one job alone."""
        results = self.ways[way]
        seconds = sum(
            share * (result.duration_s - job.begins_s)
            for share, result, job in zip(self.of_alone(way), results, self.jobs, strict=True)
        )
        first_s = min(job.begins_s for job in self.jobs)
        return seconds / (max(result.duration_s for result in results) - first_s)


def replayed_together(
    questions: Sequence[Question],
    weights: Sequence[float],
    trace: Trace,
    costs: ReconfigurationCosts,
    *,
    taken: Sequence[LostSlots],
    search: Search,
    searches: int,
    chooses_checkpoints: bool = True,
    begins: Sequence[float] | None = None,
) -> SeveralJobs:
    """Replay jobs on one trace, with the same plans and the same machines lost in every way.

    Each job moves by the policy ``sailor`` within what it has. Of the searches, half are for all
    GPUs of the trace and half for parts: a quarter is guessed, the last one improves the splits of
    the commonest availabilities. ``begins`` has the seconds of arrival, by default all 0.
    """
    sharers = [
        SharingJob(
            plans_for(question, trace, taken, search, searches=max(1, searches // 2)), weight
        )
        for question, weight in zip(questions, weights, strict=True)
    ]
    sizes = [pool.gpus_per_machine for pool in questions[0].cluster.pools]
    seconds = trace.distinct()
    likely = [
        tuple(map(floordiv, gpus, sizes))
        for gpus in sorted(seconds, key=lambda gpus: (-seconds[gpus], gpus))
    ]
    guess_parts(sharers, likely, search, searches * 3 // 4)
    for machines in likely:
        if any(each.plans.searched < searches for each in sharers):
            improve_split(sharers, machines, search, searches)
    jobs = [
        JobOfMany(each.plans, each.plans.figures(), each.weight, begins_s)
        for each, begins_s in zip(sharers, begins or [0.0] * len(sharers), strict=True)
    ]
    play_way = partial(_play_rounds, trace, taken, costs, chooses_checkpoints)
    limits = [job.limits for job in jobs]
    by_arrival = OneAfterAnother([job.begins_s for job in jobs])
    alone = [
        play_way([replace(job, begins_s=0.0)], OneAfterAnother([0.0]), [NO_LIMITS])[
            0
        ].goodput_samples_per_s
        for job in jobs
    ]
    shared = SideBySide([_claimant(job, costs) for job in jobs])
    ways = {
        SHARE: play_way(jobs, shared, limits),
        LINE: play_way(jobs, by_arrival, limits),
    }
    meanwhile = {
        way: tuple(
            _play_rounds(
                trace.until(result.duration_s), taken, costs, chooses_checkpoints,
                [job], OneAfterAnother([job.begins_s]), [NO_LIMITS],
            )[0].samples
            for job, result in zip(jobs, results, strict=True)
        )
        for way, results in ways.items()
    }  # fmt: skip
    return SeveralJobs(trace, tuple(jobs), tuple(alone), ways, meanwhile)


def _claimant(job: JobOfMany, costs: ReconfigurationCosts) -> RunningShare:
    """What a job asks for: any of its plans."""
    steps_s = [each.iteration_s * (1 + costs.checkpoint_share) for each in job.figures]
    down_s = {plan: costs.planned_s + step_s for plan, step_s in enumerate(steps_s)}
    return RunningShare(SharingJob(job.plans, job.weight).choices(), job.weight, down_s)


def _play_rounds(
    trace: Trace,
    taken: Sequence[LostSlots],
    costs: ReconfigurationCosts,
    chooses_checkpoints: bool,
    jobs: Sequence[JobOfMany],
    divide: Divide,
    limits: Sequence[RunLimits],
) -> tuple[PolicyResult, ...]:
    """Play all jobs up to the first end, divide the machines anew, and go on.

    What happened before an end does not depend on it, so each round begins at the beginning.
    """
    plans = [job.plans for job in jobs]
    results: dict[int, PolicyResult] = {}
    ends: dict[int, float] = {}
    while len(results) < len(jobs):
        spans = spans_by_job(trace, taken, plans, divide, [job.begins_s for job in jobs], ends)
        played: dict[int, PolicyResult] = {}
        for number, job in enumerate(jobs):
            if number not in results:
                intervals = CheckpointIntervals(job.figures, costs, chooses_checkpoints)
                policy = SailorPolicy(
                    job.plans, job.figures, costs, intervals, limits[number].steps
                )
                played[number] = play(
                    spans[number], job.figures, job.plans.fits, policy, costs, limits[number]
                )
        first = min(played, key=lambda number: (played[number].duration_s, number))
        if played[first].ended == "trace":
            results |= played
        else:
            results[first] = played[first]
            ends[first] = played[first].duration_s
    return tuple(results[number] for number in range(len(jobs)))
