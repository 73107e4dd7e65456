"""The files that commands take, read together so that the mistakes of all are told at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from simulator.cluster.cluster import Cluster
from simulator.cluster.cluster_file import load_cluster
from simulator.documents.files import load_document
from simulator.documents.problems import InputError, Problems
from simulator.inputs.job_file import load_job
from simulator.inputs.plan_file import load_plan
from simulator.spec.job import Job
from simulator.spec.plan import Plan

FILE = click.Path(path_type=Path)
PROFILES = click.option(
    "--profiles",
    type=FILE,
    metavar="DIR",
    help="Folder with profiles_<name>.json and, if measured, network.json.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")

KEYS = {"plan": "pipelines", "job": "training", "cluster": "pool"}
"""A key that only this kind of file has."""

T = TypeVar("T")


def load_job_and_cluster(job: Path, cluster: Path) -> tuple[Job, Cluster]:
    """Read both files."""
    problems = Problems()
    the_job, the_cluster = _try(load_job, job, problems), _try(load_cluster, cluster, problems)
    problems.raise_if_any()
    assert the_job is not None
    assert the_cluster is not None
    return the_job, the_cluster


def load_all(job: Path, cluster: Path, plan: Path) -> tuple[Job, Cluster, Plan]:
    """Read all three files."""
    problems = Problems()
    the_job, the_cluster = _try(load_job, job, problems), _try(load_cluster, cluster, problems)
    the_plan = _try(load_plan, plan, problems)
    if problems.found:
        _check_order(job, cluster, plan)
    problems.raise_if_any()
    assert the_job is not None
    assert the_cluster is not None
    assert the_plan is not None
    return the_job, the_cluster, the_plan


def check_outputs(outputs: tuple[Path | None, ...], inputs: tuple[Path, ...]) -> None:
    """No output may take the place of a file that is read, nor two outputs be one.

    What cannot be written is refused here too, before anybody waits for what is to be in it.
    """
    taken = {path.resolve(): path for path in inputs}
    problems = Problems()
    for path in outputs:
        if path is None:
            continue
        if path.resolve() in taken:
            problems.add(str(path), "would be written over", "name another file for the output")
        elif path.is_dir():
            problems.add(str(path), "is a directory", "name a file inside it")
        elif not path.parent.is_dir():
            why = "cannot be written: No such file or directory"
            problems.add(str(path), why, "name another file")
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            problems.add(str(path), "cannot be written: Permission denied", "name another file")
        taken[path.resolve()] = path
    problems.raise_if_any()


def _check_order(job: Path, cluster: Path, plan: Path) -> None:
    """Files that are only in the wrong order deserve one sentence instead of many mistakes."""
    wrong = Problems()
    for path, meant in ((plan, "plan"), (job, "job"), (cluster, "cluster")):
        try:
            keys = load_document(path).data
        except InputError:
            continue
        looks = next((kind for kind, key in KEYS.items() if key in keys), meant)
        if looks != meant:
            wrong.add(
                str(path), f"looks like a {looks}, not a {meant}", "the order is PLAN JOB CLUSTER"
            )
    wrong.raise_if_any()


def _try(load: Callable[[Path], T], path: Path, problems: Problems) -> T | None:
    try:
        return load(path)
    except InputError as error:
        problems.take(error)
        return None
