"""Weights, start times and names of several jobs, for the commands that plan for them together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import click

from planner.problem.question import Question
from simulator.documents.problems import InputError, Problem, Problems

WEIGHTS = click.option(
    "--weights",
    metavar="NUMBERS",
    help="Of several jobs, separated by commas: how much each counts. By default all count alike.",
)


def weights_of(text: str | None, jobs: Sequence[Path]) -> list[float]:
    """Read the weights of the jobs; without any, all are equal."""
    if text is None:
        return [1.0] * len(jobs)
    return _numbers("--weights", text, jobs, "above 0", lambda weight: 0 < weight < math.inf)


def begins_of(text: str | None, jobs: Sequence[Path], end_s: float) -> list[float]:
    """Read when the jobs come, in seconds of a trace; without any, all are there at its start."""
    if text is None:
        return [0.0] * len(jobs)
    what = f"of seconds from 0 to below {end_s:g}, where the trace ends"
    return _numbers("--begins", text, jobs, what, lambda at_s: 0 <= at_s < end_s)


def _numbers(
    option: str, text: str, jobs: Sequence[Path], what: str, is_valid: Callable[[float], bool]
) -> list[float]:
    """Read a number for each of several jobs."""
    cure = f"give {len(jobs)} numbers {what}, separated by commas, in the order of the jobs"
    if len(jobs) == 1:
        raise InputError(Problem(option, "is for several jobs", "give more job files"))
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(Problem(option, f'is "{text}"', cure)) from None
    if len(numbers) != len(jobs) or not all(map(is_valid, numbers)):
        raise InputError(Problem(option, f'is "{text}"', cure))
    return numbers


def refuse_deadlines(questions: Iterable[Question], problems: Problems) -> None:
    """Refuse jobs with a deadline: none is kept where jobs share a cluster."""
    for question in questions:
        if question.job.objective.deadline is not None:
            place = f"{question.job.name}: objective.deadline"
            cure = "leave it out, or ask about the job alone"
            problems.add(place, "is not kept where several jobs share a cluster", cure)


def job_names(questions: Iterable[Question]) -> list[str]:
    """The names of the jobs; of equal ones all but the first get their position."""
    names: list[str] = []
    for number, question in enumerate(questions, start=1):
        name = question.job.name
        while name in names:
            name = f"{name} {number}"
        names.append(name)
    return names
