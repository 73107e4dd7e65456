"""A local cluster that loses a worker while a seal takes seconds; what came of it, as JSON.

``python -m tests.sailord.local.sealing_cluster FOLDER``, a process of its own since a launcher
adopts orphans.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from sailord.local.cluster import LocalCluster
from sailord.local.paths import LocalFolders
from tests.fakes.slow_worker import SEAL_S, STEP_S
from tests.processes import wait_for
from tests.sailord.local.running import job_of

MACHINES = (("large", "zone-a"),) * 2
EVERY = 8
"""Steps between two snapshots; the last one before the loss is ``AFTER`` steps back."""
AFTER = 6
WITHIN_S = 120.0


def tell(folder: Path) -> dict[str, Any]:
    """Kill a worker between two snapshots; return which step the job lost."""
    os.environ |= {SEAL_S: "1.5", STEP_S: "0.5"}
    place = LocalFolders(folder, "tests.fakes.slow_worker")
    with LocalCluster(place, MACHINES) as cluster:
        client = cluster.client
        cluster.start()
        job_text = place.job("exact.toml").replace("layers = 6", "layers = 2")  # Fits one device.
        text = f"{job_text}\n[checkpoint]\nmemory_every = {EVERY}\n"
        client.ask("POST", "/v1/jobs", {"job": text, "id": "exact"})

        job = partial(job_of, client)
        wait = partial(wait_for, within_s=WITHIN_S, told=job, every_s=0.02)
        wait("it does not train", lambda: job()["step"] > EVERY and job()["step"] % EVERY == AFTER)
        killed_at = job()["step"]
        home = next(iter(sorted((place.node("a2") / "process").glob("*.1.*/process.json"))))
        os.kill(json.loads(home.read_text(encoding="utf-8"))["pid"], signal.SIGKILL)
        wait("it does not go on", lambda: job()["generation"]["number"] > 1)
        wait("it stands still", lambda: job()["step"] > killed_at + 2)
        return {
            "killed_at": killed_at,
            "point": job()["generation"]["restore"]["point"],
            "moves": client.ask("GET", "/v1/jobs/exact/moves")["moves"],
        }


if __name__ == "__main__":
    print(json.dumps(tell(Path(sys.argv[1]))))
