"""Several jobs under the command ``replay``: what it checks, and what it prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.problem.question import Question
from planner.replay.several_jobs import JobOfMany, SeveralJobs
from sailord.cli.planning.several_jobs import job_names, refuse_deadlines
from sailord.text.table import table
from sailord.text.units import duration
from simulator.documents.problems import Problems
from simulator.traces.play_types import PolicyResult
from simulator.traces.trace import Trace


def check_together(
    questions: Sequence[Question], trace: Trace, *, has_deadline: bool, has_plot: bool
) -> None:
    """Refuse what a replay of several jobs cannot do."""
    problems = Problems()
    for option, is_given in (("--deadline", has_deadline), ("--plot", has_plot)):
        if is_given:
            problems.add(option, "is for a single job", "leave it out, or give one job file")
    refuse_deadlines(questions, problems)
    for number, pool in enumerate(questions[0].cluster.pools):
        size = pool.gpus_per_machine
        part = next((each for each in trace.intervals if each.gpus[number] % size), None)
        if part is not None:
            what = (
                f"has {part.gpus[number]} GPUs of {pool.gpu}@{pool.zone} at {part.start_s:g} s,"
                f" where machines have {size}: several jobs share whole machines"
            )
            problems.add(trace.name, what, f"give multiples of {size}, or one job file")
    problems.raise_if_any()


def to_json(result: SeveralJobs, ways: Sequence[str]) -> dict[str, Any]:
    """The results for a program."""
    names = job_names(job.plans.question for job in result.jobs)
    return {
        "trace": result.trace.name,
        "duration_s": result.trace.end_s,
        "ways": [
            {
                "way": way,
                "together": result.together(way),
                "ended_s": max(each.duration_s for each in result.ways[way]),
                "jobs": [
                    {
                        "job": name,
                        "weight": job.weight,
                        "submitted_s": job.begins_s,
                        "goodput_samples_per_s": _rate(job, each),
                        "share_of_alone": share,
                        "samples": each.samples,
                        "steps": each.steps,
                        "steps_lost": each.steps_lost,
                        "reconfigurations": each.reconfigurations,
                        "began_s": _began_s(each),
                        "ended": each.ended,
                        "ended_s": each.duration_s,
                        "cost_usd": each.usd,
                    }
                    for name, job, each, share in zip(
                        names, result.jobs, result.ways[way], result.of_alone(way), strict=True
                    )
                ],
            }
            for way in ways
        ],
    }


def text_of(result: SeveralJobs, ways: Sequence[str]) -> str:
    """The results for a person."""
    trace = result.trace
    gpus = [sum(interval.gpus) for interval in trace.intervals]
    lines = [
        f"trace       {trace.name}: {duration(trace.end_s)}, {len(gpus) - 1} changes,"
        f" {min(gpus)} to {max(gpus)} GPUs",
    ]
    names = job_names(job.plans.question for job in result.jobs)
    for name, job, alone in zip(names, result.jobs, result.alone, strict=True):
        lines.append(
            f"job         {name}: weight {job.weight:g}, {job.plans.distinct_plans} plans,"
            f" {job.plans.searched} searches, alone {alone:.4g} samples/s"
        )
    header = ["", "job", "samples/s", "of alone", "steps", "steps lost", "moves", "begins", "ends",
              "$"]  # fmt: skip
    rows = []
    for way in ways:
        results, shares = result.ways[way], result.of_alone(way)
        rows += [
            [
                way,
                name,
                f"{_rate(job, each):.4g}",
                f"{share:.1%}",
                f"{each.steps:,.0f}",
                f"{each.steps_lost:,.0f}",
                str(each.reconfigurations),
                _time(_began_s(each)),
                _time(each.duration_s if each.ended != "trace" else None),
                "-" if each.usd is None else f"{each.usd:.2f}",
            ]
            for name, job, each, share in zip(names, result.jobs, results, shares, strict=True)
        ]
        rows.append(_sum_row(way, result, results))
    return "\n".join([*lines, "", table(header, rows)])


def _sum_row(way: str, result: SeveralJobs, results: Sequence[PolicyResult]) -> list[str]:
    usd = [each.usd for each in results if each.usd is not None]
    last_s = max(each.duration_s for each in results)
    ends = all(each.ended != "trace" for each in results)
    return [
        way,
        "together",
        "",
        f"{result.together(way):.1%}",
        "",
        f"{sum(each.steps_lost for each in results):,.0f}",
        str(sum(each.reconfigurations for each in results)),
        "",
        _time(last_s if ends else None),
        f"{sum(usd):.2f}" if len(usd) == len(results) else "-",
    ]


def _rate(job: JobOfMany, result: PolicyResult) -> float:
    """Samples per second from when the job comes until its end."""
    return result.samples / (result.duration_s - job.begins_s)


def _began_s(result: PolicyResult) -> float | None:
    return next((each.start_s for each in result.segments if each.kind == "training"), None)


def _time(at_s: float | None) -> str:
    return "-" if at_s is None else duration(at_s)
