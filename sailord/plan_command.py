"""The command ``plan``: the best plan for a job on a cluster, offline."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from planner.answer import DEFAULT_BUDGETS, SPACES, Answer, Question, Space, read_ahead
from planner.sailor import plan_job
from sailord import report
from simulator.cluster import Cluster
from simulator.cluster_file import load_cluster
from simulator.errors import InputError, Problem, Problems
from simulator.job import Job
from simulator.job_file import load_job
from simulator.plan_file import plan_text
from simulator.request import ESTIMATORS, load_measurements

NO_PLAN = 1

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("job", type=_FILE)
@click.argument("cluster", type=_FILE)
@click.option(
    "--profiles",
    type=_FILE,
    metavar="DIR",
    help="Folder with profiles_<name>.json and, if measured, network.json.",
)
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
@click.option("--save", type=_FILE, metavar="PLAN", help="Write the plan to this file.")
@click.option("--explain", is_flag=True, help="Say why this plan, and why not others.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
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
    the_job, the_cluster = _load(job, cluster)
    if planner != "sailor":
        raise InputError(Problem("--planner", f'"{planner}" is not known', "known is sailor"))
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


def _load(job: Path, cluster: Path) -> tuple[Job, Cluster]:
    """Read both files, and tell the mistakes of both together."""
    problems = Problems()
    the_job = the_cluster = None
    try:
        the_job = load_job(job)
    except InputError as error:
        problems.take(error)
    try:
        the_cluster = load_cluster(cluster)
    except InputError as error:
        problems.take(error)
    problems.raise_if_any()
    assert the_job is not None
    assert the_cluster is not None
    return the_job, the_cluster


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
