"""The command ``plan``: the best plan for a job on a cluster, offline."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from planner.api import plan_job
from planner.compare.interface import Mode
from planner.compare.judge_all import Entry, case_of, enter
from planner.compare.registry import SAILOR, baseline, names
from planner.problem.question import DEFAULT_BUDGETS, SPACES, Answer, Question, Space, read_ahead
from planner.what_if import explained
from sailord.cli import estimate_text
from sailord.cli.deadline import seconds_left
from sailord.cli.inputs import FILE, JSON, PROFILES, check_outputs, load_job_and_cluster
from sailord.plots.figure import check_picture
from sailord.plots.plan import write_plot
from simulator.api import ESTIMATORS, estimator, load_measurements
from simulator.documents.problems import InputError, Problem, nearest
from simulator.estimate.result import Estimate
from simulator.inputs.plan_file import plan_text
from simulator.spec.plan import Plan

NO_PLAN = 1


@click.command()
@click.argument("job", type=FILE)
@click.argument("cluster", type=FILE)
@PROFILES
@click.option(
    "--planner",
    default=SAILOR,
    show_default=True,
    metavar="NAME",
    help=f"Ours, or one of the literature: {', '.join(names())}.",
)
@click.option(
    "--mode",
    type=click.Choice(["fixed", "published"]),
    default="fixed",
    show_default=True,
    help="A planner of the literature with its known defects mended, or as published.",
)
@click.option(
    "--estimator",
    "estimator_name",
    default="event",
    show_default=True,
    metavar="NAME",
    help=f"What judges the plans: one of {', '.join(ESTIMATORS)}.",
)
@click.option("--space", type=click.Choice(SPACES), default="full", show_default=True)
@click.option(
    "--budget",
    type=click.IntRange(min=1),
    help="Plans that may be judged; by default "
    + ", ".join(f"{budget} ({name})" for name, budget in DEFAULT_BUDGETS.items()),
)
@click.option("--save", type=FILE, metavar="PLAN", help="Write the plan to this file.")
@click.option("--plot", type=FILE, metavar="FILE", help="Draw the plan as .svg or .png.")
@click.option("--explain", is_flag=True, help="Say why this plan, and why not others.")
@JSON
def plan(
    job: Path,
    cluster: Path,
    profiles: Path | None,
    planner: str,
    mode: Mode,
    estimator_name: str,
    space: Space,
    budget: int | None,
    save: Path | None,
    plot: Path | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Find the best plan for JOB on CLUSTER.

    Exits with 0 exactly when it prints a plan, with 1 if there is none.
    """
    check_outputs((save, plot), (job, cluster))
    if plot is not None:
        check_picture(plot)
    the_job, the_cluster = load_job_and_cluster(job, cluster)
    if planner not in names():
        raise InputError(
            Problem("--planner", f'"{planner}" is not known', nearest(planner, names()))
        )
    measurements = load_measurements(profiles, catalogue=the_cluster.catalogue)
    measurements = read_ahead(measurements, the_job, the_cluster.catalogue)
    question = Question(
        the_job, the_cluster, measurements, estimator_name, space, budget, seconds_left(the_job)
    )
    if planner == SAILOR:
        found = _ours(question, explain=explain)
    else:
        found = _of_the_literature(question, planner, mode)
    if isinstance(found, list):
        for problem in found:
            click.echo(f"no plan: {problem}", err=True)
        raise SystemExit(NO_PLAN)
    if save is not None:
        save.write_text(plan_text(found.plan), encoding="utf-8")
    if plot is not None:
        judge = estimator(
            estimator_name, job=the_job, cluster=the_cluster, measurements=measurements
        )
        write_plot(found.plan, found.estimate, judge, plot)
    if as_json:
        click.echo(json.dumps(found.document, indent=1, allow_nan=False))
    else:
        page = estimate_text.estimate_text(found.plan, the_job, found.estimate)
        click.echo("\n".join([page, *found.lines]))


@dataclass(frozen=True, slots=True)
class _Found:
    """A plan, with what programs and people are told beyond its estimate."""

    plan: Plan
    estimate: Estimate
    document: dict[str, Any]
    lines: tuple[str, ...]


def _ours(question: Question, *, explain: bool) -> _Found | list[Problem]:
    started = time.perf_counter()
    answer = plan_job(question)
    seconds = time.perf_counter() - started
    if answer.plan is None or answer.estimate is None:
        return list(answer.problems)
    plan, estimate, lines = answer.plan, answer.estimate, [_search_line(answer, seconds)]
    if explain:
        answer = explained(question, answer)
        lines += ["", *answer.explain]
    return _Found(plan, estimate, answer.to_json(seconds=seconds), tuple(lines))


def _search_line(answer: Answer, seconds: float) -> str:
    unit = "$" if answer.goal == "cost" else "s"
    return (
        f"search      {seconds:.3f} s, {answer.evaluations} plans judged; no plan is better than "
        f"{answer.lower_bound:.4g} {unit} (gap {answer.gap or 0:.1%})"
    )


def _of_the_literature(question: Question, name: str, mode: Mode) -> _Found | list[Problem]:
    judge = estimator(
        question.estimator,
        job=question.job,
        cluster=question.cluster,
        measurements=question.measurements,
    )
    started = time.perf_counter()
    entry = enter(baseline(name), case_of(question), mode, judge, question.seconds_left)
    seconds = time.perf_counter() - started
    if entry.plan is None or entry.estimate is None:
        return [_nothing(entry)]
    document = entry.to_json(seconds=seconds, goal=question.job.objective.goal)
    own = ""
    if entry.own_seconds is not None:
        own = f"; it thought {entry.own_seconds:.4g} s ({entry.own_error:+.0%})"
    line = f"search      {seconds:.3f} s by {name}, {_passed_over(entry)}{own}"
    return _Found(entry.plan, entry.estimate, document, (line,))


def _passed_over(entry: Entry) -> str:
    """What came before the answer in the planner's own list."""
    counts = [
        f"{count} {what.replace('_', ' ')}" for what, count in entry.passed_over.items() if count
    ]
    return f"passed over {', '.join(counts)}" if counts else "its first plan"


def _nothing(entry: Entry) -> Problem:
    counts = _passed_over(entry) if any(entry.passed_over.values()) else "no plan at all"
    return Problem(entry.planner, f"{entry.why_not} ({counts})", "ask another planner")
