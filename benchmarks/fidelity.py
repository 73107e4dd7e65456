"""Predicted against measured iteration times on a cluster with real delays between its zones.

    python benchmarks/fidelity.py [--steps N] [--json FILE]

Needs root. Profiles the example job's layers on this machine, starts four nodes in three zones as
network namespaces, has the agents measure the links, and then trains on several sets of nodes, each
with the plan that sailord finds for it. All nodes compute several times slower than this machine,
so that they share its cores without waiting for each other; the profile is scaled alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from machine import report_stolen_time

from sailord.client import ServerProblem
from sailord.local.cluster import LocalCluster
from sailord.local.paths import Place
from sailord.local.zone_file import Zones, load_zones

SLOWER = {"large": 2.0, "small": 4.0}
ZONES = f"""
[[zone]]
name = "zone-a"
nodes = 2
delay_ms = 0.2
nic_mbit_per_s = 400
times_slower = {SLOWER["large"]}

[[zone]]
name = "zone-b"
nic_mbit_per_s = 400
times_slower = {SLOWER["large"]}

[[zone]]
name = "zone-c"
gpu = "small"
nic_mbit_per_s = 400
times_slower = {SLOWER["small"]}

[[link]]
from = "zone-a"
to = "zone-b"
delay_ms = 2
mbit_per_s = 200

[[link]]
from = "zone-a"
to = "zone-c"
delay_ms = 15
mbit_per_s = 50

[[link]]
from = "zone-b"
to = "zone-c"
delay_ms = 15
mbit_per_s = 50
"""
SETS = ("a1", "c1", "a1 a2", "a1 b1", "a1 c1", "b1 c1", "a1 a2 b1", "a1 a2 c1", "a1 a2 b1 c1")
WITHIN_S = 180.0
STEPS_FIRST = 5
"""Steps that do not count: connections open, and a snapshot is taken at each."""


def wait_for(cluster: LocalCluster, holds: Callable[[], Any]) -> Any:
    """The first true answer."""
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end:
        cluster.look_after()
        try:
            if value := holds():
                return value
        except ServerProblem:
            pass
        time.sleep(0.2)
    raise TimeoutError


def profile(place: Place, job: Path) -> None:
    """Measure the layers once, and write them for both kinds, as slow as their nodes are."""
    folder = place.folder / "profiles"
    subprocess.run(
        [sys.executable, "-m", "worker", "profile", str(job), "--out", str(folder), "--force",
         "--kind", "emulated-large", "--device", "cpu", "--threads", "1", "--tp", "1",
         "--catalogue", str(place.folder / "catalogue.toml"), "--budget", "40"],
        check=True,
    )  # fmt: skip
    (file,) = folder.glob("profiles_*.json")
    found = json.loads(file.read_text())
    measured, found["timings"] = found["timings"], []
    for kind, times in SLOWER.items():
        for entry in measured:
            scaled = {
                "gpu": f"emulated-{kind}",
                "tp": entry["tp"],
                "micro_batch": entry["micro_batch"],
                "forward_s": [seconds * times for seconds in entry["forward_s"]],
                "backward_s": [seconds * times for seconds in entry["backward_s"]],
                "optimizer_s": entry["optimizer_s"] * times,
            }
            found["timings"].append(scaled)
    file.write_text(json.dumps(found))


def shape_of(plan: dict[str, Any]) -> str:
    """A plan in a few words: layers by zone, for each pipeline."""
    return " | ".join(
        " ".join(
            f"{stage['layers'][0]}-{stage['layers'][1] - 1}@{stage['zone'][-1]}"
            for stage in pipeline["stages"]
        )
        for pipeline in plan["pipelines"]
    )


def run_on(cluster: LocalCluster, nodes: Sequence[str], text: str, name: str) -> dict[str, Any]:
    """Train on these nodes; return what was predicted and measured."""
    ask = cluster.client.ask
    for node in cluster.nodes:
        order = "uncordon" if node in nodes else "cordon"
        try:
            ask("POST", f"/v1/nodes/{node}/{order}", {})
        except ServerProblem:
            continue  # It is so already.
    ask("POST", "/v1/jobs", {"job": text, "id": name})

    def job() -> Any:
        found = ask("GET", "/v1/status")["job"]
        return found if found is not None and found["id"] == name else None

    try:
        wait_for(cluster, lambda: (found := job()) and found["step"] >= STEPS_FIRST)
        steps, begun = job()["step"], time.monotonic()
        last = wait_for(cluster, lambda: (f := job()) and f["step"] >= steps + STEPS and f)
        measured = (time.monotonic() - begun) / (last["step"] - steps)
    finally:
        ask("POST", f"/v1/jobs/{name}/cancel", {})
        wait_for(cluster, lambda: not job())
    predicted = last["predicted"]["iteration_s"]
    return {
        "nodes": " ".join(nodes),
        "plan": shape_of(last["plan"]),
        "predicted_s": predicted,
        "measured_s": measured,
        "error": predicted / measured - 1,
    }


def ranks(values: Sequence[float]) -> list[int]:
    """Return the rank of each value."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    return [order.index(index) for index in range(len(values))]


def main() -> None:
    """Run all sets of nodes, and print a table."""
    with tempfile.TemporaryDirectory(prefix="fidelity-") as name:
        folder = Path(name)
        (folder / "zones.toml").write_text(ZONES)
        zones: Zones = load_zones(folder / "zones.toml")
        place = Place(folder / "c", memory_gib=1.9)
        with LocalCluster(place, zones=zones) as cluster:
            cluster.claim()
            text = place.job("job.toml")
            job = folder / "job.toml"
            job.write_text(text)
            profile(place, job)
            cluster.start()
            cluster.client.ask("POST", "/v1/network")
            is_done = "is_measuring"
            wait_for(cluster, lambda: not cluster.client.ask("GET", "/v1/network")[is_done])
            print(f"{'nodes':<14}{'predicted':>10}{'measured':>10}{'error':>8}  plan", flush=True)
            rows = []
            for number, nodes in enumerate(SETS):
                row = run_on(cluster, nodes.split(), text, f"r{number}")
                rows.append(row)
                print(
                    f"{row['nodes']:<14}{row['predicted_s']:>8.3f} s{row['measured_s']:>8.3f} s"
                    f"{row['error']:>8.1%}  {row['plan']}",
                    flush=True,
                )
    errors = [abs(row["error"]) for row in rows]
    pairs = zip(
        *(ranks([row[key] for row in rows]) for key in ("predicted_s", "measured_s")), strict=True
    )
    n = len(rows)
    rho = 1 - 6 * sum((a - b) ** 2 for a, b in pairs) / (n * (n * n - 1))
    print(
        f"mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}, rank correlation {rho:.2f}"
    )
    if ARGUMENTS.json:
        ARGUMENTS.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12, help="Steps that are measured.")
    parser.add_argument("--json", type=Path)
    ARGUMENTS = parser.parse_args()
    STEPS = ARGUMENTS.steps
    with report_stolen_time():
        main()
