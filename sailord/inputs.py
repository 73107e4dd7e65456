"""The files that commands take, read together so that the mistakes of all are told at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from simulator.cluster import Cluster
from simulator.cluster_file import load_cluster
from simulator.errors import InputError, Problems
from simulator.job import Job
from simulator.job_file import load_job
from simulator.plan import Plan
from simulator.plan_file import load_plan

FILE = click.Path(path_type=Path)
PROFILES = click.option(
    "--profiles",
    type=FILE,
    metavar="DIR",
    help="Folder with profiles_<name>.json and, if measured, network.json.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")

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
    problems.raise_if_any()
    assert the_job is not None
    assert the_cluster is not None
    assert the_plan is not None
    return the_job, the_cluster, the_plan


def _try(load: Callable[[Path], T], path: Path, problems: Problems) -> T | None:
    try:
        return load(path)
    except InputError as error:
        problems.take(error)
        return None
