"""Has sailord move a running job over the zones, and reads what each phase took."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from agents.daemon.process_cleanup import children_of
from benchmarks.machine import put_ahead, wait_for
from sailord.local.cluster import LocalCluster
from sailord.local.paths import LocalFolders
from sailord.local.zone_file import Zones

STEPS_BETWEEN = 4
"""Steps between two changes."""
CHANGES = (
    ("addition of a2", "uncordon", "a2"),
    ("drain of a2", "drain", "a2"),
    ("addition of b1", "uncordon", "b1"),
    ("loss of b1", "kill", "b1"),
    # By now sailord has measured a move of each kind.
    ("a2 once more", "withdraw", "a2"),
    ("drain of a2, again", "drain", "a2"),
    ("addition of b2", "add", "b2"),
    ("loss of b2", "kill", "b2"),
)
KIND = {"drain": "notice", "kill": "loss"}
"""The kind of the reconfiguration that follows an order; after others it is an addition."""
LATER = tuple(name for name, _, _ in CHANGES[4:])
"""Changes that come after a measured move of their kind, which corrects the prediction."""


def moves_of(zones: Zones, folder: Path) -> list[dict[str, Any]]:
    """Return each change with its reconfiguration, as ``sailorctl moves --json`` shows it."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="moves-") as name:
        place = LocalFolders(Path(name) / "c", memory_gib=1.9)
        with LocalCluster(place, zones=zones) as cluster:
            cluster.claim()
            shutil.copytree(folder / "profiles", place.folder / "profiles")
            cluster.start()
            for pid in children_of(os.getpid()):
                put_ahead(pid)
            ask = cluster.client.ask
            for node in ("a2", "b1"):
                ask("POST", f"/v1/nodes/{node}/cordon", {})
            text = (folder / "job.toml").read_text(encoding="utf-8")
            text = text.replace('"text.npy"', f'"{folder.resolve() / "text.npy"}"')
            ask("POST", "/v1/jobs", {"job": text, "id": "m"})

            def moves() -> list[dict[str, Any]]:
                listed: list[dict[str, Any]] = ask("GET", "/v1/jobs/m/moves")["moves"]
                return listed

            def step() -> int:
                job = ask("GET", "/v1/status")["job"]
                return 0 if job is None else int(job["step"])

            wait_for(cluster, moves)
            node_kind, zone = cluster.nodes["b1"].kind, cluster.nodes["b1"].zone
            for what, order, node in CHANGES:
                before, at = len(moves()), step()

                def has_gone_on(at: int = at) -> bool:
                    return step() >= at + STEPS_BETWEEN

                wait_for(cluster, has_gone_on)
                if order == "kill":
                    cluster.kill_node(node)
                elif order == "add":
                    cluster.add_node(node_kind, zone)
                else:
                    ask("POST", f"/v1/nodes/{node}/{order}", {})
                kind = KIND.get(order, "addition")

                def its_moves(before: int = before, kind: str = kind) -> list[dict[str, Any]]:
                    return [move for move in moves()[before:] if move["kind"] == kind]

                try:
                    move = wait_for(cluster, its_moves)[0]
                except TimeoutError:
                    print(f"{what}: sailord did not move the job", flush=True)
                    continue
                found.append({"change": what, **move})
                print(what, _phases(move["phases"]), flush=True)
    return found


def _phases(phases: Any) -> str:
    pairs = phases.items() if isinstance(phases, dict) else phases
    return " ".join(f"{name} {seconds:.2f}" for name, seconds in pairs)
