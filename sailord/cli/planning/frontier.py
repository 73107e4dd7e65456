"""The command ``frontier``: plans that no other plan beats in both speed and cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from planner.api import plan_job
from planner.cost_frontier import DEFAULT_POINTS, Frontier, FrontierPlan
from planner.cost_frontier import frontier as find_frontier
from sailord.cli.planning.estimate_text import gpus_text
from sailord.cli.planning.question import BUDGET, exit_without_plan, read_question
from sailord.cli.shared.described_job import JobFile, takes_script
from sailord.cli.shared.inputs import ESTIMATOR, PROFILES, check_outputs
from sailord.cli.shared.options import FILE, JSON, show
from sailord.plots.figure import check_picture
from sailord.plots.frontier import draw_frontier
from sailord.text.table import table
from simulator.documents.problems import InputError, Problem
from simulator.inputs.plan_file import plan_text, plan_to_json


@click.command()
@click.argument("job", type=FILE)
@click.argument("cluster", type=FILE)
@takes_script
@PROFILES
@ESTIMATOR
@BUDGET
@click.option(
    "--points",
    type=click.IntRange(min=2, max=100),
    default=DEFAULT_POINTS,
    show_default=True,
    help="Plans printed at most; takes about as many searches.",
)
@click.option("--save", type=FILE, metavar="DIR", help="Write each plan into this folder.")
@click.option("--plot", type=FILE, metavar="FILE", help="Draw the frontier as .svg or .png.")
@JSON
def frontier(
    job: JobFile,
    cluster: Path,
    profiles: Path | None,
    estimator_name: str,
    budget: int | None,
    points: int,
    save: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Find the trade-off of throughput and cost.

    Prints the plans for JOB on CLUSTER of which none is both faster and cheaper than another, the
    fastest first. All keep the job's limits; exits with 1 if no plan does.
    """
    check_outputs((plot,), (job.path, cluster))
    if plot is not None:
        check_picture(plot)
    question = read_question(
        job, cluster, profiles, estimator_name, budget=budget, has_deadline=True
    )
    started = time.perf_counter()
    found = find_frontier(question, points=points)
    seconds = time.perf_counter() - started
    if not found.points:
        exit_without_plan(plan_job(question).problems)
    files: Sequence[Path | None] = (
        _save(found, save) if save is not None else [None] * len(found.points)
    )
    if plot is not None:
        draw_frontier(found, question.job.name, plot)
    show(_to_json(found, files, seconds), as_json, lambda _: _text(found, files, seconds))


def _save(found: Frontier, folder: Path) -> list[Path]:
    """Write the plans, numbered as in the printed table."""
    width = len(str(len(found.points)))
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, point in enumerate(found.points, start=1):
            path = folder / f"plan-{number:0{width}}.json"
            path.write_text(plan_text(point.plan), encoding="utf-8")
            files.append(path)
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        raise InputError(Problem(str(folder), what, "name another folder")) from None
    return files


def _to_json(found: Frontier, files: Sequence[Path | None], seconds: float) -> dict[str, Any]:
    points = [_point_json(point, file) for point, file in zip(found.points, files, strict=True)]
    search = {"seconds": seconds, "judged": found.judged, "on_front": found.found}
    return {"points": points, "search": search}


def _point_json(point: FrontierPlan, file: Path | None) -> dict[str, Any]:
    estimate = point.estimate
    return {
        "iteration_s": point.seconds,
        "throughput_samples_per_s": estimate.throughput_samples_per_s,
        "cost_usd_per_iteration": point.usd,
        "cost_usd_per_hour": point.usd_per_hour,
        "gpus_used": point.plan.gpus_used(),
        "plan": plan_to_json(point.plan),
        "file": None if file is None else str(file),
    }


def _text(found: Frontier, files: Sequence[Path | None], seconds: float) -> str:
    header = ["", "samples/s", "s/iteration", "$/iteration", "$/hour", "pipelines", "GPUs"]
    rows = [
        [
            str(number),
            f"{point.estimate.throughput_samples_per_s:.4g}",
            f"{point.seconds:.3f}",
            f"{point.usd:.5f}",
            f"{point.usd_per_hour:.2f}",
            str(len(point.plan.pipelines)),
            gpus_text(point.plan),
        ]
        for number, point in enumerate(found.points, start=1)
    ]
    lines = [table(header, rows), ""]
    lines.append(
        f"search  {seconds:.3f} s, {found.judged} plans judged, {found.found} on the frontier"
    )
    lines += [f"plan    {files[0]} to {files[-1]}"] if files[0] is not None else []
    return "\n".join(lines)
