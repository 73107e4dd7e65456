"""Job, cluster and plan files of a command, read together: one run reports all their mistakes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from sailord.cli.shared.described_job import JobFile
from sailord.cli.shared.options import FILE
from simulator.api import ESTIMATORS
from simulator.cluster.cluster import Cluster
from simulator.cluster.cluster_file import load_cluster
from simulator.documents.files import load_document
from simulator.documents.problems import InputError, Problems
from simulator.inputs.plan_file import load_plan
from simulator.spec.job import Job
from simulator.spec.plan import Plan

PROFILES = click.option(
    "--profiles",
    type=FILE,
    metavar="DIR",
    help="Folder with profiles_<name>.json and, if measured, network.json.",
)
ESTIMATOR = click.option(
    "--estimator",
    "estimator_name",
    default="event",
    show_default=True,
    metavar="NAME",
    help=f"Estimator that judges plans: one of {', '.join(ESTIMATORS)}.",
)

KEYS = {"plan": "pipelines", "job": "training", "cluster": "pool"}
"""A key that only this kind of file has, to recognise files in the wrong order."""

S = TypeVar("S")
T = TypeVar("T")


def load_job_and_cluster(job: JobFile, cluster: Path) -> tuple[Job, Cluster]:
    """Read the job and the cluster file."""
    problems = Problems()
    the_job, the_cluster = _try(JobFile.load, job, problems), _try(load_cluster, cluster, problems)
    if problems.found:
        _check_order((job.path, "job"), (cluster, "cluster"))
    problems.raise_if_any()
    assert the_job is not None
    assert the_cluster is not None
    return the_job, the_cluster


def load_all(job: JobFile, cluster: Path, plan: Path) -> tuple[Job, Cluster, Plan]:
    """Read the job, the cluster and the plan file."""
    problems = Problems()
    the_job, the_cluster = _try(JobFile.load, job, problems), _try(load_cluster, cluster, problems)
    the_plan = _try(load_plan, plan, problems)
    if problems.found:
        _check_order((plan, "plan"), (job.path, "job"), (cluster, "cluster"))
    problems.raise_if_any()
    assert the_job is not None
    assert the_cluster is not None
    assert the_plan is not None
    return the_job, the_cluster, the_plan


def check_outputs(outputs: tuple[Path | None, ...], inputs: tuple[Path, ...]) -> None:
    """Refuse outputs that would overwrite an input or another output, or that cannot be written.

    Called before the work begins, so that a long search does not end in this error.
    """
    taken = {path.resolve(): path for path in inputs}
    problems = Problems()
    for path in outputs:
        if path is None:
            continue
        if path.resolve() in taken:
            problems.add(str(path), "would be overwritten", "name another file for the output")
        elif path.is_dir():
            problems.add(str(path), "is a directory", "name a file inside it")
        elif not path.parent.is_dir():
            why = "cannot be written: No such file or directory"
            problems.add(str(path), why, "name another file")
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            problems.add(str(path), "cannot be written: Permission denied", "name another file")
        taken[path.resolve()] = path
    problems.raise_if_any()


def _check_order(*files: tuple[Path, str]) -> None:
    """Report files in the wrong order as such, instead of every mistake that follows from it."""
    wrong = Problems()
    order = " ".join(meant.upper() for _, meant in files)
    for path, meant in files:
        try:
            keys = load_document(path).data
        except InputError:
            continue
        looks = next((kind for kind, key in KEYS.items() if key in keys), meant)
        if looks != meant:
            what = f"looks like a {looks}, not a {meant}"
            wrong.add(str(path), what, f"swapped? The order is {order}")
    wrong.raise_if_any()


def _try(load: Callable[[S], T], source: S, problems: Problems) -> T | None:
    try:
        return load(source)
    except InputError as error:
        problems.take(error)
        return None
