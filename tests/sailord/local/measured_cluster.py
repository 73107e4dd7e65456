"""A local cluster that trains one pipeline of two stages; its schedule is printed as JSON.

``python -m tests.sailord.local.measured_cluster FOLDER``, a process of its own since a launcher
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

TIMES_SLOWER = 10
"""Passes then take longer than a rank may have to wait for a core of this machine."""
MACHINES = (("large", "zone-a"),) * 2
WITHIN_S = 60.0
TIMELINE = "/v1/jobs/exact/timeline"


def tell(folder: Path) -> dict[str, Any]:
    """Return the schedule once both stages have measured a step."""
    slow = folder.with_name("slow")
    slow.write_text(f"a1 {TIMES_SLOWER}\na2 {TIMES_SLOWER}\n", encoding="utf-8")
    os.environ[SLOW] = str(slow)
    place = LocalFolders(folder)
    with LocalCluster(place, MACHINES) as cluster:
        client = cluster.client
        cluster.start()
        text = place.job("exact.toml").replace("layers = 6", "layers = 3")  # Two devices hold it.
        client.ask("POST", "/v1/jobs", {"job": text, "id": "exact"})

        job = partial(job_of, client)

        def is_measured() -> bool:
            measured = client.ask("GET", TIMELINE)["measured"]
            groups = () if measured is None else measured["pipelines"][0]["groups"]
            return bool(groups) and not any(group["why_none"] for group in groups)

        wait = partial(wait_for, within_s=WITHIN_S, told=job)
        wait("it does not train", lambda: job()["step"] > 0)
        wait("no step is measured", is_measured)
        return {
            "step": job()["step"],
            "whole": client.ask("GET", TIMELINE),
            "measured_alone": client.ask("GET", f"{TIMELINE}?predicted=false"),
        }


if __name__ == "__main__":
    print(json.dumps(tell(Path(sys.argv[1]))))
