"""Reads the question of a planning command from its files, and exits if there is no plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import click

from planner.api import best_answer
from planner.compare.judge_all import JudgedPlanner
from planner.problem.question import Answer, Question, Space, read_ahead
from planner.search.search_cache import SearchCache
from sailord.cli.shared.described_job import JobFile
from sailord.cli.shared.exit_codes import FAILED
from sailord.cli.shared.inputs import load_job_and_cluster
from simulator.api import Estimator, estimator, load_measurements
from simulator.documents.problems import InputError, Problem, nearest
from simulator.spec.job import Job

BUDGET = click.option("--budget", type=click.IntRange(min=1), help="Plans judged in each search.")


def read_question(
    job: JobFile,
    cluster: Path,
    profiles: Path | None,
    estimator_name: str,
    *,
    space: Space = "full",
    budget: int | None = None,
    has_deadline: bool = False,
) -> Question:
    """Read the files of a question; with ``has_deadline`` the job's deadline limits the plan, as
    its budget does.
    """
    the_job, the_cluster = load_job_and_cluster(job, cluster)
    measurements = load_measurements(profiles, catalogue=the_cluster.catalogue)
    measurements = read_ahead(measurements, the_job, the_cluster.catalogue)
    left = seconds_left(the_job) if has_deadline else None
    if has_deadline and the_job.objective.max_usd_total is not None and the_job.steps is None:
        what = "training.steps is not given"
        click.echo(f"note: objective.max_usd_total is not checked: {what}", err=True)
    return Question(the_job, the_cluster, measurements, estimator_name, space, budget, left)


def seconds_left(job: Job, now: datetime | None = None) -> float | None:
    """Return the seconds until the job's deadline, negative after it; ``None``: no deadline."""
    if job.objective.deadline is None:
        return None
    if job.steps is None:
        what = "needs the number of iterations of the job"
        cure = "set training.steps, or leave the deadline out"
        raise InputError(Problem("objective.deadline", what, cure))
    left = datetime.fromisoformat(job.objective.deadline) - (now or datetime.now(UTC))
    return left.total_seconds()


def chosen_names(text: str, known: Sequence[str], option: str) -> tuple[str, ...]:
    """Split names at commas; "all" means every known one, an unknown one is an error."""
    if text == "all":
        return tuple(known)
    chosen = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        name = unknown[0] if unknown else text
        raise InputError(Problem(option, f'"{name}" is not known', nearest(name, known)))
    return chosen


def search_afresh(asked: Question) -> Answer:
    """Search for a plan as if nothing had been searched before, without a bound."""
    return best_answer(replace(asked, is_bounded=False), SearchCache())


def judge_of(question: Question) -> Estimator:
    """Return the estimator that judges the plans of a question."""
    return estimator(
        question.estimator,
        job=question.job,
        cluster=question.cluster,
        measurements=question.measurements,
    )


def rejected_text(entry: JudgedPlanner) -> str:
    """Return why plans of a planner's ranking were rejected, with counts; empty: none was."""
    return ", ".join(f"{n} {why.replace('_', ' ')}" for why, n in entry.passed_over.items() if n)


def exit_without_plan(problems: Iterable[Problem]) -> NoReturn:
    """Print why there is no plan, and exit."""
    for problem in problems:
        click.echo(f"no plan: {problem}", err=True)
    raise SystemExit(FAILED)
