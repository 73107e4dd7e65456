"""A local cluster on which a bit flips in a rank's weights; what came of it, as JSON.

``python -m tests.sailord.local.flipping_cluster FOLDER``, a process of its own since a launcher
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
from sailord.local.tour.reference_run import start_reference_run
from sailord.local.tour.step_log import StepLog
from tests.fakes.flipping_worker import FLIPPED, STEP
from tests.processes import wait_for
from tests.sailord.local.running import job_of

MACHINES = (("large", "zone-a"),) * 3
EVERY = 5
"""Steps between two comparisons, and between two checkpoints."""
LAST = STEP + 17
WITHIN_S = 150.0


def tell(folder: Path) -> dict[str, Any]:
    """Train past the flip; return which steps differ from those of an undisturbed run."""
    os.environ[FLIPPED] = str(folder.with_name("flipped"))
    place = LocalFolders(folder, "tests.fakes.flipping_worker")
    with LocalCluster(place, MACHINES) as cluster:
        client = cluster.client
        cluster.start()
        model = place.job("exact.toml").replace("layers = 6", "layers = 2")  # Fits one device.
        kept = f'uri = "file://{folder}/kept"\npersist_every = {EVERY}\ncompare_every = {EVERY}\n'
        client.ask("POST", "/v1/jobs", {"job": f"{model}\n[checkpoint]\n{kept}", "id": "exact"})
        job, log = partial(job_of, client), StepLog(folder, "exact")
        wait = partial(
            wait_for, within_s=WITHIN_S, told=job, meanwhile=log.read_new_lines, every_s=0.02
        )
        wait("it does not go back", lambda: (job()["generation"] or {"number": 0})["number"] > 1)
        wait("it stands still", lambda: log.highest(job()["generation"]["number"]) >= LAST)
        generation = job()["generation"]
        nodes = client.ask("GET", "/v1/nodes")["nodes"]
        history = client.ask("GET", "/v1/jobs/exact/history")["history"]
        log.read_new_lines()
        reference = start_reference_run(folder, "exact", model)
        try:
            right = reference.losses(LAST)
        finally:
            reference.end()
    return {
        "restore": generation["restore"],
        "quarantined": [each["name"] for each in nodes if each["state"] == "cordoned"],
        "said": [line["text"] for line in history],
        "wrong": [
            [each.generation, each.step]
            for each in sorted(log.steps.values(), key=lambda each: (each.generation, each.step))
            if each.step <= LAST and abs(each.loss / right[each.step] - 1) > 1e-9
        ],
    }


if __name__ == "__main__":
    print(json.dumps(tell(Path(sys.argv[1]))))
