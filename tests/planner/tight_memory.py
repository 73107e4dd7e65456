"""The cluster of `sailorctl up` with other memory and fewer machines."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from planner.problem.question import Question
from simulator.api import Measurements
from simulator.cluster.cluster_file import load_cluster
from simulator.inputs.job_file import load_job

DATA = Path(__file__).parents[2] / "sailord" / "local" / "data"


def demo(memory_gib: float, *machines: int, folder: Path) -> Question:
    """The cluster of `sailorctl up` with these numbers of machines by zone, one GPU each."""
    catalogue = (DATA / "catalogue.toml").read_text(encoding="utf-8")
    (folder / "catalogue.toml").write_text(catalogue.replace("= 1.408", f"= {memory_gib}"))
    shutil.copy(DATA / "cluster.toml", folder)
    cluster = load_cluster(folder / "cluster.toml")
    pools = zip(cluster.pools, machines, strict=True)
    some = replace(cluster, pools=tuple(replace(pool, gpus=n) for pool, n in pools))
    return Question(load_job(DATA / "job.toml"), some, Measurements(), proves=False)
