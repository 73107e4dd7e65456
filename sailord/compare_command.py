"""The command ``compare``: all planners on one case, judged by one simulator."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from planner.answer import Question
from planner.case import Case, Mode
from planner.contest import Entry, enter
from planner.registry import SAILOR, baseline, names
from planner.sailor import plan_job
from sailord.inputs import FILE, JSON, PROFILES, load_job_and_cluster
from sailord.table import table
from simulator.cluster import Cluster
from simulator.costs import LayerCosts
from simulator.errors import InputError, Problem, nearest
from simulator.job import Job
from simulator.request import Measurements, estimator, load_measurements, network_of
from simulator.sites import Sites

NO_PLAN = 1


@click.command()
@click.argument("job", type=FILE)
@click.argument("cluster", type=FILE)
@click.option(
    "--planners",
    default="all",
    show_default=True,
    metavar="NAMES",
    help=f"Separated by commas: {', '.join(names())}.",
)
@PROFILES
@click.option(
    "--mode",
    type=click.Choice(["fixed", "published"]),
    default="fixed",
    show_default=True,
    help="Planners of the literature with their known defects mended, or as published.",
)
@JSON
def compare(
    job: Path, cluster: Path, planners: str, profiles: Path | None, mode: Mode, as_json: bool
) -> None:
    """Let all planners plan JOB on CLUSTER, and judge their plans by one simulator.

    Each planner's plans are taken in its own order; the first that the job and the cluster allow
    and that fits the devices' memory counts. Exits with 1 if no planner has one.
    """
    the_job, the_cluster = load_job_and_cluster(job, cluster)
    wanted = _wanted(planners)
    measurements = load_measurements(profiles, catalogue=the_cluster.catalogue)
    contest = _Contest(the_job, the_cluster, measurements, mode)
    rows = []
    for name in wanted:
        started = time.perf_counter()
        entry = contest.enter(name)
        rows.append((entry, time.perf_counter() - started))
    if as_json:
        click.echo(json.dumps([_to_json(*row) for row in rows], indent=1, allow_nan=False))
    else:
        click.echo(_text(rows))
    if all(entry.plan is None for entry, _ in rows):
        raise SystemExit(NO_PLAN)


def _wanted(text: str) -> list[str]:
    if text == "all":
        return list(names())
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in names()]
    if unknown or not wanted:
        name = unknown[0] if unknown else text
        raise InputError(Problem("--planners", f'"{name}" is not known', nearest(name, names())))
    return wanted


class _Contest:
    """One case, with the tables that all planners share."""

    def __init__(self, job: Job, cluster: Cluster, measurements: Measurements, mode: Mode) -> None:
        self.question = Question(job, cluster, measurements)
        self.mode: Mode = mode
        network = network_of(cluster, measurements.network)
        profile = None
        if job.profile is not None:
            profile = measurements.profile(job.profile, catalogue=cluster.catalogue)
        costs = LayerCosts(job, profile=profile, catalogue=cluster.catalogue, network=network)
        self.case = Case(job, cluster, costs, network, Sites(cluster, measurements.network))
        self.judge = estimator("event", job=job, cluster=cluster, measurements=measurements)

    def enter(self, name: str) -> Entry:
        """One planner's entry; a planner that cannot start on this case says why."""
        ask: Callable[[], Entry] = (
            self._own
            if name == SAILOR
            else lambda: enter(baseline(name), self.case, self.mode, self.judge)
        )
        try:
            return ask()
        except InputError as error:
            return Entry(name, None, None, None, why_not=str(error.problems[0]))

    def _own(self) -> Entry:
        answer = plan_job(self.question)
        why_not = str(answer.problems[0]) if answer.problems else ""
        return Entry(SAILOR, answer.plan, answer.estimate, None, why_not=why_not)


def _to_json(entry: Entry, seconds: float) -> dict[str, Any]:
    estimate = entry.estimate
    found: dict[str, Any] = {
        "planner": entry.planner,
        "found": entry.plan is not None,
        "search_s": seconds,
        "rejected": {
            "inexpressible": entry.inexpressible,
            "not_allowed": entry.unlawful,
            "out_of_memory": entry.too_large,
        },
    }
    if entry.plan is None or estimate is None:
        return found | {"why_not": entry.why_not}
    return found | {
        "iteration_s": estimate.iteration_s,
        "throughput_samples_per_s": estimate.throughput_samples_per_s,
        "cost_usd_per_iteration": estimate.money.total_usd,
        "gpus_used": entry.plan.gpus_used(),
        "own_iteration_s": entry.own_seconds,
        "own_error": entry.own_error,
    }


def _text(rows: list[tuple[Entry, float]]) -> str:
    header = ["planner", "s/iteration", "samples/s", "$/iteration", "GPUs", "pipelines",
              "out of memory", "not sayable", "own error", "search s"]  # fmt: skip
    ranked = sorted(
        rows, key=lambda row: row[0].estimate.iteration_s if row[0].estimate else float("inf")
    )
    cells, reasons = [], []
    for entry, seconds in ranked:
        cells.append([entry.planner, *_cells(entry), f"{seconds:.2f}"])
        if entry.plan is None:
            reasons.append(f"no plan of {entry.planner}: {entry.why_not}")
    return "\n".join([table(header, cells), *reasons])


def _cells(entry: Entry) -> list[str]:
    counts = [str(entry.too_large), str(entry.inexpressible + entry.unlawful)]
    if entry.plan is None or entry.estimate is None:
        return ["-"] * 5 + counts + ["-"]
    estimate, usd = entry.estimate, entry.estimate.money.total_usd
    return [
        f"{estimate.iteration_s:.3f}",
        f"{estimate.throughput_samples_per_s:.4g}",
        "-" if usd is None else f"{usd:.4g}",
        str(entry.plan.device_count),
        str(len(entry.plan.pipelines)),
        *counts,
        "-" if entry.own_error is None else f"{entry.own_error:+.0%}",
    ]
