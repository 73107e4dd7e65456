"""Predicted against measured: plans of one's choice on a cluster with real delays between zones.

    python -m benchmarks.fidelity [--out DIR] [--resume] [--only NAME ...] [--phases ...]

Needs root, and a machine that does nothing else. It measures the example job's layers, the links
between the zones as agents see them, and what this host takes per message; predicts the plans of
``fidelity_plans``; trains each for real, its ranks in the network namespaces of their nodes; and
lets sailord reconfigure a running job. All nodes compute several times slower than this machine, so
that they share its cores: a node sleeps for the rest of the time that its work would take.

DIR keeps what was measured, plan by plan (``runs.json``), so that ``--resume`` goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agents.daemon.process_cleanup import children_of
from benchmarks.fidelity_moves import moves_of
from benchmarks.fidelity_plans import NODES, SLOWER, TEXT_OF_JOB, ZONES, NamedPlan, named_plans
from benchmarks.fidelity_report import write_document, write_report
from benchmarks.machine import put_ahead, wait_for
from benchmarks.shaped_ranks import Measured, ShapedRank, measure_host, run_plan, shaped_network
from planner.api import plan_job
from planner.problem.question import Question, read_ahead
from planner.replan.nodes import PlannerNode
from planner.replan.replanner import Replanner
from sailord.local.cluster import LocalCluster
from sailord.local.paths import LocalFolders
from sailord.local.zone_file import Zones, load_zones
from sailord.plots.timeline import lanes_of
from simulator.api import Measurements, estimator, load_measurements
from simulator.cluster.cluster import Cluster
from simulator.cluster.cluster_file import load_cluster
from simulator.estimate.event_estimator import EventEstimator
from simulator.inputs.job_file import load_job
from simulator.inputs.plan_file import plan_to_json
from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.data.sources.open_data import open_data

WITHIN_S = 180.0
WAITED_MOST = 0.05
STOLEN_MOST = 0.02
"""Limits of a run that counts: the longest wait of a rank for a core, as a share of the step, and
the share of the cores' time that the host stole."""
PROFILES = 4
MEASURED_S = 8.0
"""Seconds that the measured steps of a plan take together, roughly."""
AHEAD = ("chrt", "--rr", "1") if os.geteuid() == 0 else ()
PHASES = ("profile", "links", "host", "plans", "moves")
PORT = 29500


@dataclass(eq=False)
class Experiment:
    """The folder of an experiment, and what is in it."""

    folder: Path
    resumes: bool
    zones: Zones = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "zones.toml").write_text(ZONES)
        self.zones = load_zones(self.folder / "zones.toml")
        # Only its text and its catalogue are used. Each plan below fits into 1.9 GiB.
        local = LocalFolders(self.folder, memory_gib=1.9)
        (self.folder / "catalogue.toml").write_text(local.catalogue() + _LARGER)
        (self.folder / "job.toml").write_text(TEXT_OF_JOB)
        for name, more in (("cluster", ""), ("machines", _POOLS_OF_LARGER)):
            (self.folder / f"{name}.toml").write_text(_POOLS + more)
        local._write_text()

    @property
    def job(self) -> Job:
        return load_job(self.folder / "job.toml")

    @property
    def cluster(self) -> Cluster:
        """The nodes with one GPU each, among which the planner chooses."""
        return load_cluster(self.folder / "cluster.toml")

    @property
    def machines(self) -> Cluster:
        """The nodes of ``cluster``, and nodes with two GPUs."""
        return load_cluster(self.folder / "machines.toml")

    def measurements(self, cluster: Cluster) -> Measurements:
        network, host = self.read("network.json"), self.read("host.json")
        # One of the two steps of an all-reduce between two ranks carries half of the bytes.
        steps_s = np.interp(
            network["sizes_bytes"],
            [size / 2 for size in host["all_reduce_bytes"]],
            [seconds / 2 for seconds in host["all_reduce_s"]],
        )
        rates = [size / s / 1e9 for size, s in zip(network["sizes_bytes"], steps_s, strict=True)]
        network["curves"].append({"id": "within", "bandwidth_GBps": rates})
        network["intra_node"] = [{"gpu_type": "emulated-large", "gpus": 2, "curve": "within"}]
        self.write("profiles/network.json", network)
        return load_measurements(self.folder / "profiles", catalogue=cluster.catalogue)

    def judge(self) -> EventEstimator:
        cluster = self.machines
        found = estimator(
            "event", job=self.job, cluster=cluster, measurements=self.measurements(cluster)
        )
        assert isinstance(found, EventEstimator)
        return found

    def has(self, name: str) -> bool:
        return self.resumes and (self.folder / name).exists()

    def read(self, name: str) -> Any:
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else {}

    def write(self, name: str, content: Any) -> None:
        path = self.folder / name
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(path)


_LARGER = """
[machine.emulated-large-2]
gpu = "emulated-large"
gpus = 2
link = "host-memory"
nic = "loopback"
nic_gbit_per_s = 10
vcpus = 2
host_memory_gib = 4
source = "assumption: processes of one computer"
date = "2026"
"""
_POOLS = 'catalogue = "catalogue.toml"\n' + "".join(
    f'[[pool]]\nzone = "{zone}"\nmachine = "emulated-{kind}"\nmachines = {count}\n'
    for zone, kind, count in (
        ("zone-a", "large", 2),
        ("zone-b", "large", 1),
        ("zone-c", "small", 1),
    )
)
_POOLS_OF_LARGER = "".join(
    f'[[pool]]\nzone = "{zone}"\nmachine = "emulated-large-2"\nmachines = {count}\n'
    for zone, count in (("zone-a", 2), ("zone-b", 1))
)


# -- profiles ------------------------------------------------------------------------------------


def profile(about: Experiment) -> None:
    """Measure the layers, and write them for both kinds, as slow as their nodes are.

    Programs beside us slow a core down through its caches, so the least of some profiles
    counts, layer by layer.
    """
    first, *others = (_profile_once(about) for _ in range(PROFILES))
    found = first
    for at, entry in enumerate(found["timings"]):
        same = [entry, *(other["timings"][at] for other in others)]
        for key in ("forward_s", "backward_s"):
            entry[key] = [min(each) for each in zip(*(one[key] for one in same), strict=True)]
        entry["optimizer_s"] = min(one["optimizer_s"] for one in same)
    measured, found["timings"] = found["timings"], []
    for kind, times in SLOWER.items():
        for entry in measured:
            slower = {
                key: [seconds * times for seconds in entry[key]]
                for key in ("forward_s", "backward_s")
            }
            slower["optimizer_s"] = entry["optimizer_s"] * times
            found["timings"].append({**entry, "gpu": f"emulated-{kind}", **slower})
    about.write("profiles/profiles_llama.json", found)


def _profile_once(about: Experiment) -> dict[str, Any]:
    folder = about.folder / "profiles"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(
        [*AHEAD, sys.executable, "-m", "worker", "profile", str(about.folder / "job.toml"),
         "--out", str(folder), "--force", "--kind", "emulated-large", "--device", "cpu",
         "--threads", "1", "--tp", "1,2", "--micro-batches", "1,2,4", "--budget", "20",
         "--catalogue", str(about.folder / "catalogue.toml")],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    (file,) = folder.glob("profiles_*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def links(about: Experiment) -> None:
    """Have agents measure the links, as ``sailorctl profile network`` does."""
    with tempfile.TemporaryDirectory(prefix="fidelity-") as name:
        place = LocalFolders(Path(name) / "c")
        with LocalCluster(place, zones=about.zones) as cluster:
            cluster.claim()
            cluster.start()
            for pid in children_of(os.getpid()):
                put_ahead(pid)
            assert cluster.network is not None
            put_ahead(cluster.network.process.pid, priority=2)
            cluster.client.ask("POST", "/v1/network")
            ask = cluster.client.ask
            wait_for(
                cluster, lambda: not ask("GET", "/v1/network")["is_measuring"], within_s=WITHIN_S
            )
            shutil.copyfile(place.folder / "head" / "network.json", about.folder / "network.json")


# -- plans ---------------------------------------------------------------------------------------


def chosen_by_planner(about: Experiment) -> Plan:
    """The planner's plan for all nodes of one GPU each."""
    cluster = about.cluster
    measurements = read_ahead(about.measurements(cluster), about.job, cluster.catalogue)
    found = plan_job(Question(about.job, cluster, measurements))
    assert found.plan is not None, found.problems
    nodes = [
        PlannerNode(name, node.gpu, node.machine, node.zone, 1)
        for name, node in sorted(NODES.items())
    ]
    placed = Replanner(about.job, cluster, measurements).place(found.plan, nodes)
    assert placed is not None
    return placed


def predict(about: Experiment, plan: Plan) -> dict[str, Any]:
    """What the simulator says of a plan."""
    judge = about.judge()
    found = judge.estimate(plan)
    lanes = lanes_of(plan, judge)
    rows = [
        {"pipeline": number, "stage": row.stage,
         "bars": [[bar.kind, bar.start_s, bar.end_s, bar.micro_batch]
                  for bar in (*row.work, *row.sync)]}
        for lane in lanes for number in lane.pipelines for row in lane.rows
    ]  # fmt: skip
    return {
        "iteration_s": found.iteration_s,
        "error_bar": found.provenance.relative_error,
        "memory": found.to_json()["memory"],
        "bytes": {f"{a} {b}": size for (a, b), size in judge.bytes_between_zones(plan).items()},
        "timeline": rows,
    }


def shaped_ranks(plan: Plan, addresses: Mapping[str, Any]) -> list[ShapedRank]:
    """Where each rank of a plan runs."""
    return [
        ShapedRank(stage.place.node or "", addresses[stage.place.node or ""],
             SLOWER[stage.place.gpu.removeprefix("emulated-")])
        for pipeline in plan.pipelines for stage in pipeline.stages for _ in range(stage.tp)
    ]  # fmt: skip


def run_plans(about: Experiment, only: list[str], tries: int) -> None:
    """Predict and run every plan that has no undisturbed run yet."""
    chosen = chosen_by_planner(about)
    todo = [*named_plans(), NamedPlan("chosen", chosen)]
    runs: dict[str, Any] = about.read("runs.json") if about.resumes or only else {}
    job, port = about.job, PORT
    data = open_data(job, about.folder)
    with shaped_network(about.zones, about.folder) as (network, addresses):
        print(f"{'plan':<28}{'predicted':>10}{'measured':>10}{'error':>8}{'waited':>8}", flush=True)
        for named in todo:
            if only and named.name not in only:
                continue
            predicted = predict(about, named.plan)
            before = runs.get(named.name)
            if before is not None and not only and before["is_quiet"]:
                before["predicted"] = predicted  # The model may have changed since.
                about.write("runs.json", runs)
                continue
            steps = min(max(round(MEASURED_S / predicted["iteration_s"]), 6), 20)
            tried = 0
            while True:
                port, tried = port + 1, tried + 1
                found = run_plan(
                    job, named.plan, data, shaped_ranks(named.plan, addresses), network,
                    steps=steps, port=port,
                )  # fmt: skip
                is_quiet = found.waited <= WAITED_MOST and found.stolen <= STOLEN_MOST
                if is_quiet or tried >= tries:
                    break
            runs[named.name] = {
                "plan": plan_to_json(named.plan),
                "is_quiet": is_quiet,
                "predicted": predicted,
                "measured": _measured_json(found),
            }
            about.write("runs.json", runs)
            error = predicted["iteration_s"] / found.iteration_s - 1
            print(
                f"{named.name:<28}{predicted['iteration_s']:>8.3f} s{found.iteration_s:>8.3f} s"
                f"{error:>8.1%}{found.waited:>8.1%}",
                flush=True,
            )


def _measured_json(found: Measured) -> dict[str, Any]:
    return {
        "iteration_s": found.iteration_s,
        "spread": found.spread,
        "step_s": found.step_s,
        "waited": found.waited,
        "others": found.others,
        "stolen": found.stolen,
        "bytes": {f"{a} {b}": size for (a, b), size in found.bytes_per_step.items()},
        "ranks": found.ranks,
    }


def host(about: Experiment) -> None:
    """Measure this host's own part: messages, all-reduces within a node, the rest of a step."""
    with shaped_network(about.zones, about.folder) as (_, addresses):
        found = measure_host(addresses["a1"], PORT)
    about.write("host.json", found)


def main() -> None:
    """Run the phases that are not done, and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("fidelity"), help="Folder of results.")
    parser.add_argument("--resume", action="store_true", help="Keep what DIR has.")
    parser.add_argument("--only", nargs="*", default=[], help="Names of plans to run again.")
    parser.add_argument("--tries", type=int, default=3, help="Of a plan, until one is quiet.")
    parser.add_argument("--phases", nargs="*", choices=[*PHASES, "report"], default=[*PHASES])
    parser.add_argument("--docs", action="store_true", help="Put the tables into docs/.")
    options = parser.parse_args()
    if options.phases != ["report"] and os.geteuid() != 0:
        parser.error("needs root, for the network namespaces of the nodes")
    about = Experiment(options.out, options.resume or bool(options.only))
    begun = time.monotonic()
    for phase in options.phases:
        match phase:
            case "profile" if not about.has("profiles"):
                profile(about)
            case "links" if not about.has("network.json"):
                links(about)
            case "host" if not about.has("host.json"):
                host(about)
            case "plans":
                run_plans(about, options.only, options.tries)
            case "moves" if not about.has("moves.json"):
                about.write("moves.json", moves_of(about.zones, about.folder))
        print(f"{time.monotonic() - begun:6.1f} s  {phase}", flush=True)
    write_report(about.folder)
    if options.docs:
        write_document(about.folder)


if __name__ == "__main__":
    main()
