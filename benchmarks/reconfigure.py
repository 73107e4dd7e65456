"""Downtime of reconfigurations after lost and added nodes, against a restart under torchrun.

    python -m benchmarks.reconfigure [--processes 4 8] [--hidden 128 352] [--json FILE]

A local cluster (sailord, agents and workers as real processes) trains a LLaMA-like model of six
blocks. Four things happen to it, as in `make tour`: a notice (planned), the loss of a node whose
layers another pipeline has, the loss of the only copy of layers, and the addition of two nodes; and
a fifth, a loss while all workers but one hang: they do not react, are killed, and are restarted.
*downtime* is from the event (planned: from the last step before) to the end of the first step
after, less the median step before; *lost* are steps that were done and are done again.

*restart* is the same job, plan and trainer under ``torchrun --max-restarts``, which saves its state
with ``torch.save`` after every step: one rank is killed, all are started again and load it.
*floor* is the lower bound of any approach that rebuilds its communicators: live processes leave
all groups, form them again, and do one all-reduce.

All share this machine's cores: compare seconds only within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from benchmarks.machine import report_stolen_time
from sailord.local.cluster import FIRST_NODES, LocalCluster
from sailord.local.paths import LocalFolders
from sailord.local.tour.step_log import StepLog
from sailord.local.tour.tour_runner import PHASES, TourRunner
from sailord.text.table import table
from simulator.inputs.plan_file import load_plan
from worker.cli.local_launcher import run_ranks
from worker.distributed.process_groups import ProcessTransport
from worker.profiling.activity_board import ActivityBoard

MACHINES = {4: FIRST_NODES[1:4] + FIRST_NODES[5:6], 8: FIRST_NODES, 16: FIRST_NODES * 2}
MEMORY_GIB = {(4, 128): 1.413, (8, 128): 1.408, (16, 128): 1.408, (8, 352): 1.463}
"""GPU memory with which plans have two pipelines or more, and one after a few losses."""
STEPS_BEFORE_KILL = 6
TURNS = 5
WITHIN_S = 300.0


def job_text(place: LocalFolders, hidden: int) -> str:
    """The example job in another width."""
    text = place.job("job.toml").replace("hidden = 128", f"hidden = {hidden}")
    text += "\n[checkpoint]\nmemory_every = 1\n"
    return text.replace("ffn = 352", f"ffn = {8 * (hidden // 3)}") if hidden != 128 else text


def under_sailor(processes: int, hidden: int, keep: Path) -> list[dict[str, Any]]:
    """Measure the events under Sailor; store the job and its first plan for the other methods."""
    folder = Path(tempfile.mkdtemp(prefix="re-"))
    place = LocalFolders(folder / "c", memory_gib=MEMORY_GIB.get((processes, hidden), 1.408))
    with LocalCluster(place, MACHINES[processes]) as cluster:
        cluster.start()
        job = job_text(place, hidden)
        cluster.client.ask("POST", "/v1/jobs", {"job": job, "id": "job"})
        runner = TourRunner(cluster, "job", StepLog(place.folder, "job"), lambda _: None)
        runner.begin()
        plan = cluster.client.ask("GET", "/v1/jobs/job/plan")["plan"]
        (keep / "plan.json").write_text(json.dumps(plan))
        (keep / "job.toml").write_text(job.replace(str(place.folder), str(keep)))
        shutil.copy(place.folder / "text.npy", keep)
        if processes > 4:
            runner.give_notice()
        runner.lose_a_replica()
        runner.lose_the_only_copy()
        # With more workers some are idle already, and two more nodes would change nothing.
        if processes < 16:
            runner.add_machines(("large", "zone-a"), ("large", "zone-b"))
            runner.lose_beside_hung_workers()
        if processes <= 4:
            runner.give_notice()
    shutil.rmtree(folder)
    return [event.to_json() for event in runner.events]


def by_restart(folder: Path) -> float:
    """Seconds without a step when one rank of a run under torchrun is killed."""
    processes = load_plan(folder / "plan.json").device_count
    words = ["--nproc-per-node", str(processes), "--max-restarts", "1", "--standalone"]
    script = Path(__file__).with_name("restarting.py")
    run = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words, str(script), str(folder), "1000"],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "torchrun.log").open("wb"),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[1])},
        start_new_session=True,
    )
    try:
        before = _steps(folder, run, life=0, count=STEPS_BEFORE_KILL)
        at = time.time()
        os.kill(before[-1]["pid"], signal.SIGKILL)
        after = _steps(folder, run, life=1, count=1)
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait()
    ends = [line["at"] for line in before]
    step_s = statistics.median(b - a for a, b in pairwise(ends))
    return float(after[0]["at"] - at - step_s)


def _steps(folder: Path, run: subprocess.Popen[bytes], *, life: int, count: int) -> list[Any]:
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end and run.poll() is None:
        if (folder / "steps").exists():
            lines = [json.loads(line) for line in (folder / "steps").open() if line.endswith("\n")]
            found = [line for line in lines if line["life"] == life]
            if len(found) >= count:
                return found
        time.sleep(0.02)
    log = (folder / "torchrun.log").read_text(errors="replace").splitlines()
    raise SystemExit("\n".join(["torchrun did not get on:", *log[-20:]]))


def floor_s(processes: int) -> float:
    """Return the fewest seconds in which live processes leave and rebuild all groups."""
    took: list[float] = []
    with socket.create_server(("127.0.0.1", 0), backlog=processes) as server:
        port = server.getsockname()[1]

        def body(rank: int, say: Any) -> None:
            torch.set_num_threads(1)
            limit = timedelta(seconds=WITHIN_S)
            if rank == 0:
                taken = server.detach()
                store = TCPStore(
                    "127.0.0.1", port, is_master=True, timeout=limit, wait_for_workers=False,
                    master_listen_fd=taken,
                )  # fmt: skip
            else:
                store = TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
            everybody = tuple(range(processes))
            for turn in range(TURNS):
                begin_s = time.perf_counter()
                transport = ProcessTransport(store, rank, processes, generation=str(turn))
                transport.group(everybody).all_reduce(torch.zeros(1))
                if rank == 0:
                    say({"kind": "took", "seconds": time.perf_counter() - begin_s})
                transport.close()
            store.set(f"over/{rank}", "")
            if rank == 0:  # The store goes with its process.
                store.wait([f"over/{other}" for other in everybody])

        run_ranks(
            body,
            ranks=processes,
            board=ActivityBoard(processes),
            on_message=lambda _, message: took.append(message["seconds"]),
        )
    return min(took)


def show(
    processes: int, hidden: int, events: list[dict[str, Any]], others: Mapping[str, float]
) -> None:
    """One table."""
    print(f"\n{processes} processes, hidden {hidden}")
    rows = []
    for event in events:
        spent = " ".join(
            f"{name} {event['phases'][name]:.2f}"
            for name in PHASES
            if event["phases"][name] is not None
        )
        times = (f"{event[name]:.2f} s" for name in ("downtime_s", "predicted_s"))
        rows.append([event["kind"], str(event["steps_lost"]), *times, spent])
    rows += [[name, "", f"{seconds:.2f} s", "", ""] for name, seconds in others.items()]
    print(table(("", "lost", "downtime", "predicted", "phases"), rows))
    losses = [event for event in events if event["kind"].startswith("loss")]
    for event in losses if "restart" in others else ():
        print(f"restart is {others['restart'] / event['downtime_s']:.1f} times a {event['kind']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 8], choices=MACHINES)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128])
    parser.add_argument("--json", type=Path, help="Where the figures go.")
    wishes = parser.parse_args()
    found = []
    for processes in wishes.processes:
        for hidden in wishes.hidden:
            with report_stolen_time(), tempfile.TemporaryDirectory() as folder:
                events = under_sailor(processes, hidden, Path(folder))
                others = {"restart": by_restart(Path(folder)), "floor": floor_s(processes)}
            show(processes, hidden, events, others)
            found.append({"processes": processes, "hidden": hidden, "events": events, **others})
    if wishes.json is not None:
        wishes.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
