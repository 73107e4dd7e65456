"""The command ``compare``: all planners on one case, judged by one simulator."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from planner.api import asked_with_spot_first, plan_job
from planner.compare.interface import Mode
from planner.compare.judge_all import JudgedPlanner, case_of, judge_entry
from planner.compare.registry import SAILOR, baseline, names
from planner.compare.sub_clusters import sub_clusters
from planner.problem.preference import PlanEstimate, why_tied
from planner.problem.question import Question
from sailord.cli.planning.question import chosen_names, judge_of, read_question, rejected_text
from sailord.cli.planning.timed_result import SearchKilled, TimedResult, measured
from sailord.cli.shared.described_job import JobFile, takes_script
from sailord.cli.shared.exit_codes import FAILED
from sailord.cli.shared.inputs import ESTIMATOR, PROFILES
from sailord.cli.shared.options import FILE, JSON, show
from sailord.text.table import table
from simulator.api import Estimator
from simulator.documents.problems import InputError
from simulator.spec.job import Goal


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
@click.option(
    "--whole",
    is_flag=True,
    help="Ask about the whole cluster only. By default planners of the literature are also asked"
    " about parts of it, and the best answer counts.",
)
@click.option("--budget", type=click.IntRange(min=1), help="Plans to judge by our planner.")
@JSON
def compare(
    job: JobFile,
    cluster: Path,
    planners: str,
    profiles: Path | None,
    mode: Mode,
    estimator_name: str,
    whole: bool,
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
    judge, goal = judge_of(question), question.job.objective.goal
    rows = [_best_row(question, name, mode, judge, whole=whole) for name in wanted]
    other = asked_with_spot_first(question)
    if other is not None:
        # Ours asks by itself.
        rows = [
            row
            if row.entry.plan is not None or name == SAILOR
            else _best_row(other, name, mode, judge_of(other), whole=whole)
            for name, row in zip(wanted, rows, strict=True)
        ]
    show([row.to_json() for row in rows], as_json, lambda _: _text(rows, goal))
    if all(row.entry.plan is None for row in rows):
        raise SystemExit(FAILED)


@dataclass(frozen=True, slots=True)
class _Row:
    """A planner's answer with what its search took, and how many clusters it was asked about."""

    entry: JudgedPlanner
    search_s: float
    peak_bytes: int | None
    tried: int = 1
    tried_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """One entry of ``compare --json``."""
        return _to_json(self.entry) | {
            "search_s": self.search_s,
            "peak_bytes": self.peak_bytes,
            "tried": self.tried,
            "tried_s": self.tried_s,
        }


def _best_row(question: Question, name: str, mode: Mode, judge: Estimator, *, whole: bool) -> _Row:
    """The planner's best answer for the cluster and for parts of it; ours chooses by itself."""
    is_whole = whole or name == SAILOR
    clusters = (question.cluster,) if is_whole else sub_clusters(question.cluster)
    found = [
        _measure_entry(replace(question, cluster=cluster), name, mode, judge)
        for cluster in clusters
    ]
    goal = question.job.objective.goal
    best = min(found, key=lambda one: _objective(one.result, goal))
    seconds = sum(one.seconds for one in found)
    return _Row(best.result, best.seconds, best.peak_bytes, len(found), seconds)


def _measure_entry(
    question: Question, name: str, mode: Mode, judge: Estimator
) -> TimedResult[JudgedPlanner]:
    """Run one planner in a process of its own; one that is killed enters with the reason."""
    begun = time.perf_counter()
    try:
        return measured(partial(_enter, question, name, mode, judge))
    except SearchKilled as error:
        entry = JudgedPlanner(name, None, None, why_not=str(error))
        return TimedResult(entry, time.perf_counter() - begun, None)


def _enter(question: Question, name: str, mode: Mode, judge: Estimator) -> JudgedPlanner:
    """Run one planner; one that cannot take this case enters with the reason."""
    try:
        if name != SAILOR:
            return judge_entry(
                baseline(name), case_of(question), mode, judge, question.seconds_left
            )
        answer = plan_job(replace(question, is_bounded=False))
    except InputError as error:
        return JudgedPlanner(name, None, None, why_not=str(error.problems[0]))
    why_not = str(answer.problems[0]) if answer.problems else ""
    gpus = sum(pool.gpus for pool in question.cluster.pools)
    return JudgedPlanner(SAILOR, answer.plan, answer.estimate, why_not=why_not, given_gpus=gpus)


def _objective(entry: JudgedPlanner, goal: str) -> float:
    """What is minimised; infinite without a plan."""
    if entry.estimate is None:
        return math.inf
    value = entry.estimate.money.total_usd if goal == "cost" else entry.estimate.iteration_s
    return math.inf if value is None else value


def _to_json(entry: JudgedPlanner) -> dict[str, Any]:
    estimate = entry.estimate
    found: dict[str, Any] = {
        "planner": entry.planner,
        "found": entry.plan is not None,
        "given_gpus": entry.given_gpus,
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


def _text(rows: list[_Row], goal: Goal) -> str:
    header = ["planner", "s/iteration", "samples/s", "$/iteration", "GPUs", "pipelines",
              "rejected", "own error", "search s", "MiB"]  # fmt: skip
    ranked = sorted(rows, key=lambda row: _objective(row.entry, goal))
    cells, reasons = [], []
    for row in ranked:
        entry, peak = row.entry, row.peak_bytes
        mib = "-" if peak is None else f"{peak / 2**20:.0f}"
        cells.append([entry.planner, *_cells(entry), f"{row.search_s:.2f}", mib])
        if entry.plan is None:
            reasons.append(f"no plan of {entry.planner}: {entry.why_not}")
    fewer = sum(row.tried > 1 for row in rows)
    tried = max(row.tried for row in rows)
    note = f"each planner was asked about {tried} parts of the cluster; its best answer counts"
    return "\n".join(
        [table(header, cells), *reasons, *([note] if fewer else []), *_ties(ranked, goal)]
    )


def _ties(ranked: list[_Row], goal: Goal) -> list[str]:
    """What cannot be told apart from the first answer, under the event estimator."""
    judged = [
        (row.entry.planner, PlanEstimate(row.entry.plan, row.entry.estimate))
        for row in ranked
        if row.entry.plan is not None and row.entry.estimate is not None
    ]
    if not judged or judged[0][1].estimate.estimator != "event":
        return []
    (first, best), others = judged[0], judged[1:]
    return [
        f"{first} is {why} from {name}"
        for name, other in others
        if (why := why_tied(other, best, goal)) is not None
    ]


def _cells(entry: JudgedPlanner) -> list[str]:
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
