"""The command ``compare``: all planners on one case, judged by one simulator."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import click

from planner.api import plan_job
from planner.compare.interface import Case, Mode
from planner.compare.judge_all import Entry, case_of, enter
from planner.compare.registry import SAILOR, baseline, names
from planner.problem.question import Question
from sailord.cli.described_job import JobFile
from sailord.cli.exit_codes import FAILED
from sailord.cli.inputs import ESTIMATOR, PROFILES, takes_script
from sailord.cli.options import FILE, JSON, show
from sailord.cli.planning.question import chosen_names, judge_of, read_question, rejected_text
from sailord.text.table import table
from simulator.api import Estimator
from simulator.documents.problems import InputError


@click.command()
@click.argument("job", type=FILE)
@click.argument("cluster", type=FILE)
@takes_script
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
    help="Planners of the literature with their known defects fixed, or as published.",
)
@ESTIMATOR
@click.option("--budget", type=click.IntRange(min=1), help="Plans judged at most by our planner.")
@JSON
def compare(
    job: JobFile,
    cluster: Path,
    planners: str,
    profiles: Path | None,
    mode: Mode,
    estimator_name: str,
    budget: int | None,
    as_json: bool,
) -> None:
    """Run all planners on JOB and CLUSTER, judged by one simulator.

    Of each planner's ranking the first plan counts that the job and the cluster allow and that
    fits the devices' memory. Exits with 1 if no planner has one.
    """
    wanted = chosen_names(planners, names(), "--planners")
    question = read_question(
        *(job, cluster, profiles, estimator_name), budget=budget, has_deadline=True
    )
    case, judge = case_of(question), judge_of(question)
    rows = []
    for name in wanted:
        started = time.perf_counter()
        entry = _enter(question, name, mode, case, judge)
        rows.append((entry, time.perf_counter() - started))
    document = [_to_json(*row) for row in rows]
    show(document, as_json, lambda _: _text(rows, question.job.objective.goal))
    if all(entry.plan is None for entry, _ in rows):
        raise SystemExit(FAILED)


def _enter(question: Question, name: str, mode: Mode, case: Case, judge: Estimator) -> Entry:
    """Run one planner; one that cannot take this case enters with the reason."""
    try:
        if name != SAILOR:
            return enter(baseline(name), case, mode, judge, question.seconds_left)
        answer = plan_job(question)
    except InputError as error:
        return Entry(name, None, None, why_not=str(error.problems[0]))
    why_not = str(answer.problems[0]) if answer.problems else ""
    return Entry(SAILOR, answer.plan, answer.estimate, why_not=why_not)


def _to_json(entry: Entry, seconds: float) -> dict[str, Any]:
    estimate = entry.estimate
    found: dict[str, Any] = {
        "planner": entry.planner,
        "found": entry.plan is not None,
        "search_s": seconds,
        "rejected": dict(entry.passed_over),
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


def _text(rows: list[tuple[Entry, float]], goal: str) -> str:
    header = ["planner", "s/iteration", "samples/s", "$/iteration", "GPUs", "pipelines",
              "rejected", "own error", "search s"]  # fmt: skip

    def objective(row: tuple[Entry, float]) -> float:
        estimate = row[0].estimate
        if estimate is None:
            return math.inf
        value = estimate.money.total_usd if goal == "cost" else estimate.iteration_s
        return math.inf if value is None else value

    ranked = sorted(rows, key=objective)
    cells, reasons = [], []
    for entry, seconds in ranked:
        cells.append([entry.planner, *_cells(entry), f"{seconds:.2f}"])
        if entry.plan is None:
            reasons.append(f"no plan of {entry.planner}: {entry.why_not}")
    return "\n".join([table(header, cells), *reasons])


def _cells(entry: Entry) -> list[str]:
    counts = rejected_text(entry) or "-"
    if entry.plan is None or entry.estimate is None:
        return ["-"] * 5 + [counts, "-"]
    estimate, usd = entry.estimate, entry.estimate.money.total_usd
    return [
        f"{estimate.iteration_s:.3f}",
        f"{estimate.throughput_samples_per_s:.4g}",
        "-" if usd is None else f"{usd:.4g}",
        str(entry.plan.device_count),
        str(len(entry.plan.pipelines)),
        counts,
        "-" if entry.own_error is None else f"{entry.own_error:+.0%}",
    ]
