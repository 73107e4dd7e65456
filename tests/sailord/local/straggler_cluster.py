"""A local cluster on which one node becomes slow; what came of it is printed as JSON.

``python -m tests.sailord.local.straggler_cluster FOLDER``, a process of its own since a launcher
adopts orphans.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from sailord.local.cluster import LocalCluster
from sailord.local.paths import LocalFolders
from tests.processes import wait_for
from tests.sailord.local.running import job_of
from worker.profiling.compute_time import SLOW

MACHINES = (*(("large", "zone-a"),) * 2, *(("large", "zone-b"),) * 2)
TIMES_SLOWER = 12
"""Tests that run beside this one make all nodes wait for cores, some three times as long."""
STEPS_BEFORE = 12
WITHIN_S = 150.0
OPTIONS = "[options.testing]\nslow_times = 2.5\nslow_steps = 3\nslow_s = 2.0\n"
"""A high threshold, as nodes that share cores differ by chance; short times to keep tests fast."""


class HastyPlace(LocalFolders):
    """Its sailord calls a node slow after seconds."""

    def make(self) -> None:
        LocalFolders.make(self)
        config = self.folder / "sailord.toml"
        text = config.read_text(encoding="utf-8")
        config.write_text(text.replace("[options.testing]\n", OPTIONS), encoding="utf-8")


def tell(folder: Path) -> dict[str, Any]:
    """Let a node be slow; return what the cluster says of it at the end."""
    slow = folder.with_name("slow")
    os.environ[SLOW] = str(slow)
    with LocalCluster(HastyPlace(folder), MACHINES) as cluster:
        client, place = cluster.client, cluster.place
        cluster.start()
        client.ask("POST", "/v1/jobs", {"job": place.job("exact.toml"), "id": "exact"})

        job = partial(job_of, client)

        def nodes() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = client.ask("GET", "/v1/nodes")["nodes"]
            return found

        def node(name: str) -> dict[str, Any]:
            return next(each for each in nodes() if each["name"] == name)

        wait = partial(wait_for, within_s=WITHIN_S, told=lambda: f"{job()}; {nodes()}")
        wait("it does not train", lambda: job()["step"] >= STEPS_BEFORE)
        first = job()
        slow.write_text(f"a2 {TIMES_SLOWER}\n", encoding="utf-8")
        wait("it is not left out", lambda: node("a2")["state"] == "slow")
        wait("it does not go on", lambda: job()["generation"]["number"] > 1)
        moved = job()["generation"]["restore"]["point"]["step"]
        wait("it stands still", lambda: job()["step"] > moved + 5)
        after, marked = job(), node("a2")
        client.ask("POST", "/v1/nodes/a2/uncordon", {})
        wait("it is not given back", lambda: node("a2")["state"] == "ready")
        return {
            "before": first["members"],
            "after": after["members"],
            "marked": marked,
            "failures": after["failures"],
            "reason": after["generation"]["reason"],
            "moves": client.ask("GET", "/v1/jobs/exact/moves")["moves"],
            "history": client.ask("GET", "/v1/jobs/exact/history")["history"],
        }


if __name__ == "__main__":
    print(json.dumps(tell(Path(sys.argv[1]))))
