"""A local cluster whose job trains with chunks and loses nodes; what came of it, as JSON.

``python -m tests.sailord.local.chunked_cluster FOLDER NODES EVENT...``, a process of its own since
a launcher adopts orphans. An event is the name of a method of ``TourRunner`` that loses a node.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sailord.local.cluster import LocalCluster
from sailord.local.paths import LocalFolders
from sailord.local.tour.reference_run import largest_difference, start_reference_run
from sailord.local.tour.step_log import StepLog
from sailord.local.tour.tour_runner import TourRunner

SETTINGS = """
[objective]
allow = ["interleaved"]

[checkpoint]
memory_every = 1
"""


def tell(folder: Path, nodes: int, events: Sequence[str]) -> dict[str, Any]:
    """Lose nodes; return the shapes of the plans and what was lost."""
    place = LocalFolders(folder)
    with LocalCluster(place, (("large", "zone-a"),) * nodes) as cluster:
        cluster.start()
        # Chunks pay with few micro batches: two for each of four nodes.
        batch = f"global_batch = {8 * (nodes // 4)}"
        job = place.job("exact.toml").replace("global_batch = 16", batch) + SETTINGS
        reference = start_reference_run(folder, "exact", job)
        try:
            cluster.client.ask("POST", "/v1/jobs", {"job": job, "id": "exact"})
            runner = TourRunner(cluster, "exact", StepLog(folder, "exact"), _say)
            runner.begin()
            shapes = [_shape(cluster)]
            for event in events:
                getattr(runner, event)()
                shapes.append(_shape(cluster))
            final = runner.end()
            ours = {step: loss for step, loss in runner.ledger.losses().items() if step <= final}
            difference = largest_difference(ours, reference.losses(final))
        finally:
            reference.end()
        return {
            "shapes": shapes,
            "lost": [event.steps_lost for event in runner.events],
            "steps": final,
            "difference": difference,
        }


def _shape(cluster: LocalCluster) -> tuple[int, int, int]:
    """Pipelines, nodes, and chunks of each device group."""
    job = cluster.client.ask("GET", "/v1/status")["job"]
    plan = job["plan"]
    return len(plan["pipelines"]), len(job["members"]), plan.get("virtual_stages", 1)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    print(json.dumps(tell(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
