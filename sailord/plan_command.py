"""The command ``plan``: the best plan for a job on a cluster, offline."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from planner.answer import DEFAULT_BUDGETS, SPACES, Answer, Question, Space, read_ahead
from planner.registry import SAILOR, names
from planner.sailor import plan_job
from sailord import report
from sailord.inputs import FILE, JSON, PROFILES, check_outputs, load_job_and_cluster
from simulator.errors import InputError, Problem, nearest
from simulator.job import Job
from simulator.plan_file import plan_text
from simulator.request import ESTIMATORS, load_measurements

NO_PLAN = 1


@click.command()
@click.argument("job", type=FILE)
@click.argument("cluster", type=FILE)
@PROFILES
@click.option("--planner", default="sailor", show_default=True, metavar="NAME")
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
@click.option("--explain", is_flag=True, help="Say why this plan, and why not others.")
@JSON
def plan(
    job: Path,
    cluster: Path,
    profiles: Path | None,
    planner: str,
    estimator_name: str,
    space: Space,
    budget: int | None,
    save: Path | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Find the best plan for JOB on CLUSTER.

    Exits with 0 exactly when it prints a plan, with 1 if there is none.
    """
    check_outputs((save,), (job, cluster))
    the_job, the_cluster = load_job_and_cluster(job, cluster)
    if planner != SAILOR:
        cure = nearest(planner, names())
        if planner in names():
            cure = f"judge it with sailorctl compare --planners {planner}"
        raise InputError(Problem("--planner", f'"{planner}" does not plan here', cure))
    measurements = load_measurements(profiles, catalogue=the_cluster.catalogue)
    measurements = read_ahead(measurements, the_job, the_cluster.catalogue)
    question = Question(the_job, the_cluster, measurements, estimator_name, space, budget)
    started = time.perf_counter()
    answer = plan_job(question)
    seconds = time.perf_counter() - started
    if answer.plan is None:
        for problem in answer.problems:
            click.echo(f"no plan: {problem}", err=True)
        raise SystemExit(NO_PLAN)
    if save is not None:
        save.write_text(plan_text(answer.plan), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(answer.to_json(seconds=seconds), indent=1, allow_nan=False))
    else:
        click.echo(_text(answer, the_job, seconds, explain=explain))


def _text(answer: Answer, job: Job, seconds: float, *, explain: bool) -> str:
    assert answer.plan is not None
    assert answer.estimate is not None
    lines = [report.estimate_text(answer.plan, job, answer.estimate)]
    unit = "$" if answer.goal == "cost" else "s"
    lines.append(
        f"search      {seconds:.3f} s, {answer.evaluations} plans judged; no plan is better than "
        f"{answer.lower_bound:.4g} {unit} (gap {answer.gap or 0:.1%})"
    )
    if explain:
        lines += ["", *answer.why]
    return "\n".join(lines)
