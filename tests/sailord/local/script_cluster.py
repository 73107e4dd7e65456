"""A local cluster that trains a script's job and loses a node; what came of it is printed as JSON.

``python -m tests.sailord.local.script_cluster FOLDER SCRIPT [tls]``, a process of its own: a
launcher adopts orphans.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from sailord.authority import Authority
from sailord.local.cluster import LocalCluster
from sailord.local.paths import LocalFolders
from sailord.local.tour.step_log import StepLog
from tests.processes import SAILORCTL, wait_for

MACHINES = (*(("large", "zone-a"),) * 2, ("large", "zone-b"))
WITHIN_S = 150.0


def train(folder: Path, script: Path, *, tls: bool) -> dict[str, Any]:
    """Train the script's job, kill a node on the way, and return its losses."""
    place = LocalFolders(folder, tls=tls)
    with LocalCluster(place, MACHINES) as cluster:
        cluster.start()
        submit = [*SAILORCTL, "submit", str(script), "--id", "own"]
        submit += ["--checkpoint", str(folder.with_name("durable"))]
        subprocess.run([*submit, "--server", f"unix://{place.socket}", "--", "40"], check=True)
        shutil.rmtree(script.parent)  # What trains is what travelled.
        log = StepLog(folder, "own")

        def job() -> dict[str, Any]:
            found: dict[str, Any] = cluster.client.ask("GET", "/v1/jobs/own")
            return found

        wait = partial(wait_for, within_s=WITHIN_S, told=job, meanwhile=log.read_new_lines)
        wait("it does not train", lambda: any(step >= 5 for _, step in log.steps))
        status = cluster.client.ask("GET", "/v1/status")["job"]
        victim = status["members"][-1]
        cluster.kill_node(victim)
        wait("it does not end", lambda: job()["state"] not in {"queued", "running"})
        log.read_new_lines()
        told = cluster.client.ask("GET", "/v1/jobs/own/history")["history"]
        return {
            "state": job()["state"],
            "losses": {str(step): found.loss for (_, step), found in sorted(log.steps.items())},
            "generations": sorted({generation for generation, _ in log.steps}),
            "history": [line["text"] for line in told],
            "certified": certified(folder) if tls else [],
            "moves": cluster.client.ask("GET", "/v1/jobs/own/moves")["moves"],
        }


def certified(folder: Path) -> list[str]:
    """Who got a certificate."""
    return [str(each.owner) for each in Authority.open(folder / "ca").issued()]


if __name__ == "__main__":
    print(json.dumps(train(Path(sys.argv[1]), Path(sys.argv[2]), tls="tls" in sys.argv[3:])))
