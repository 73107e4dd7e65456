"""The command ``share``: which machines and which plan each of several jobs would get."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from planner.library.plan_library import KnownPlan
from planner.problem.question import Question
from planner.share.share_cluster import JobPart, SharedCluster, share_cluster
from planner.share.split_machines import MachineCounts
from sailord.cli.planning.question import BUDGET, read_question, search_afresh
from sailord.cli.planning.several_jobs import WEIGHTS, job_names, refuse_deadlines, weights_of
from sailord.cli.shared.described_job import JobFile
from sailord.cli.shared.exit_codes import FAILED
from sailord.cli.shared.inputs import ESTIMATOR, PROFILES
from sailord.cli.shared.options import FILE, JSON, show
from sailord.text.table import table
from simulator.cluster.cluster import Cluster
from simulator.documents.problems import InputError, Problem, Problems
from simulator.inputs.plan_file import plan_text, plan_to_json

DEFAULT_SEARCHES = 12


@click.command()
@click.argument("jobs", type=FILE, nargs=-1, required=True, metavar="JOB...")
@click.argument("cluster", type=FILE)
@PROFILES
@WEIGHTS
@click.option(
    "--searches",
    type=click.IntRange(min=1),
    default=DEFAULT_SEARCHES,
    show_default=True,
    help="Parts of the cluster for which a plan is searched, for each job.",
)
@BUDGET
@ESTIMATOR
@click.option("--save", type=FILE, metavar="DIR", help="Write each job's plan into this folder.")
@JSON
def share(
    jobs: tuple[Path, ...],
    cluster: Path,
    profiles: Path | None,
    weights: str | None,
    searches: int,
    budget: int | None,
    estimator_name: str,
    save: Path | None,
    as_json: bool,
) -> None:
    """Split CLUSTER among several jobs, by their weights.

    Prints which machines and which plan each JOB would get if all ran at once, and how fast it
    would be compared with having the whole cluster. Exits with 1 if no job has a plan.
    """
    by_weight = weights_of(weights, jobs)
    questions = [
        read_question(JobFile(job), cluster, profiles, estimator_name, budget=budget)
        for job in jobs
    ]
    _check(questions)
    names = job_names(questions)
    started = time.perf_counter()
    found = share_cluster(questions, by_weight, search_afresh, searches=searches)
    seconds = time.perf_counter() - started
    files = _save(found, names, save)
    show(
        _to_json(found, names, files, seconds),
        as_json,
        lambda _: _text(found, names, files, seconds),
    )
    if all(part.known is None for part in found.parts):
        raise SystemExit(FAILED)


def _check(questions: Sequence[Question]) -> None:
    problems = Problems()
    refuse_deadlines(questions, problems)
    if questions[0].cluster.quotas:
        cure = "leave it out, and give pools of no more GPUs than it allows"
        problems.add("[[quota]]", "is not kept where several jobs share a cluster", cure)
    for pool in questions[0].cluster.pools:
        if pool.gpus % pool.gpus_per_machine:
            what = f"has {pool.gpus} GPUs on machines of {pool.gpus_per_machine}"
            cure = "give whole machines: no two jobs share one"
            problems.add(f"{pool.gpu}@{pool.zone}", what, cure)
    problems.raise_if_any()


def _save(found: SharedCluster, names: Sequence[str], folder: Path | None) -> list[Path | None]:
    """Write the plans, each under the name of its job."""
    files: list[Path | None] = [None] * len(names)
    if folder is None:
        return files
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, (part, name) in enumerate(zip(found.parts, names, strict=True)):
            if part.known is not None:
                stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
                path = folder / f"{stem}.json"
                if path in files:  # Another name that differs in other signs only.
                    path = folder / f"{stem}-{number + 1}.json"
                path.write_text(plan_text(part.known.plan), encoding="utf-8")
                files[number] = path
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        raise InputError(Problem(str(folder), what, "name another folder")) from None
    return files


def _to_json(
    found: SharedCluster, names: Sequence[str], files: Sequence[Path | None], seconds: float
) -> dict[str, Any]:
    return {
        "together": found.together,
        "idle": dict(zip(_pools(found), found.idle, strict=True)),
        "jobs": [
            {
                "job": name,
                "weight": part.weight,
                "machines": dict(zip(_pools(found), part.machines, strict=True)),
                "share_of_alone": part.of_alone,
                "alone_samples_per_s": _rate(part.alone),
                "throughput_samples_per_s": _rate(part.known),
                "iteration_s": None if part.known is None else part.known.estimate.iteration_s,
                "cost_usd_per_hour": _usd_per_hour(part),
                "plan": None if part.known is None else plan_to_json(part.known.plan),
                "file": None if file is None else str(file),
            }
            for name, part, file in zip(names, found.parts, files, strict=True)
        ],
        "search": {
            "seconds": seconds,
            "searches": sum(part.plans.searched for part in found.parts),
        },
    }


def _text(
    found: SharedCluster, names: Sequence[str], files: Sequence[Path | None], seconds: float
) -> str:
    cluster = found.parts[0].plans.question.cluster
    header = ["job", "weight", "samples/s", "of alone", "s/iteration", "$/hour", "machines"]
    rows = [
        [
            name,
            f"{part.weight:g}",
            "-" if (rate := _rate(part.known)) is None else f"{rate:.4g}",
            f"{part.of_alone:.1%}",
            "-" if part.known is None else f"{part.known.estimate.iteration_s:.3f}",
            "-" if (usd := _usd_per_hour(part)) is None else f"{usd:.2f}",
            _machines(cluster, part.machines) if part.known is not None else _why_none(part),
        ]
        for name, part in zip(names, found.parts, strict=True)
    ]
    idle = _machines(cluster, found.idle)
    rows.append(["together", "", "", f"{found.together:.1%}", "", "", idle and f"idle: {idle}"])
    searches = sum(part.plans.searched for part in found.parts)
    lines = [table(header, rows), "", f"search  {seconds:.3f} s, {searches} searches"]
    saved = [str(file) for file in files if file is not None]
    return "\n".join([*lines, *([f"plans   {', '.join(saved)}"] if saved else ())])


def _why_none(part: JobPart) -> str:
    if part.alone is None:
        return "it has no plan on the whole cluster: see `sailorctl plan`"
    return "none: it waits"


def _rate(known: KnownPlan | None) -> float | None:
    return None if known is None else known.estimate.throughput_samples_per_s


def _usd_per_hour(part: JobPart) -> float | None:
    known = part.known
    if known is None or known.usd is None:
        return None
    return known.usd / known.estimate.iteration_s * 3600


def _pools(found: SharedCluster) -> tuple[str, ...]:
    return found.parts[0].plans.names


def _machines(cluster: Cluster, counts: MachineCounts) -> str:
    """Machines by pool: 2 x 4 A100-40@us-central1-a, ..."""
    return ", ".join(
        f"{count} x {pool.gpus_per_machine} {pool.gpu}@{pool.zone}{' spot' * pool.spot}"
        for count, pool in zip(counts, cluster.pools, strict=True)
        if count
    )
