"""How long replanning takes after a loss on 512 GPUs of two kinds in three zones.

    python -m benchmarks.replan [--profiles DIR] [--repeat N] [--model NAME]

Each row loses random nodes that the running plan uses. Times are wall-clock time and processor
time, which is fairer on a shared machine; ``x`` is the time relative to the first plan's.
``slower`` is the next plan's loss of throughput against the running one; the row ``dropped`` only
drops the broken pipelines.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from planner.api import plan_job
from planner.problem.question import Question, read_ahead
from planner.replan.answers_ahead import Precomputed
from planner.replan.damage import RunningPlan
from planner.replan.nodes import PlannerNode, nodes_of, nodes_used
from planner.replan.replanner import Replan, Replanner
from sailord.text.table import table
from simulator.api import load_measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.models.presets import preset
from simulator.spec.job import Job

ZONES = ("us-central1-a", "us-central1-b", "us-west1-b")
POOLS = {"A100-40": (72, 3.0), "V100-16": (96, 2.0)}
"""GPUs in each zone and the price of one; the first zone has eight more A100s."""
MODELS = {"opt-350m": ("OPT-350", 1024), "gpt-neo-2.7b": ("GPT-Neo-2.7", 2048)}

Losses = list[tuple[PlannerNode, ...]]
"""The cluster after each loss."""


def question(model: str, profiles: Path | None) -> Question:
    """The job and its 512 GPUs."""
    catalogue = load_catalogue()
    pools = tuple(
        Pool(
            zone=zone,
            gpu=gpu,
            machine=f"{gpu}x4",
            gpus_per_machine=4,
            gpus=gpus + 8 * (zone == ZONES[0] and gpu == "A100-40"),
            price_usd_per_gpu_hour=price,
            price_source="cluster file",
        )
        for zone in ZONES
        for gpu, (gpus, price) in POOLS.items()
    )
    profile, batch = MODELS[model]
    job = Job(
        model,
        preset(model),
        global_batch=batch,
        sequence=2048,
        profile=profile if profiles is not None else None,
        precision="fp32",
        optimizer="adam",
        max_tp=4,
    )
    measurements = read_ahead(load_measurements(profiles, catalogue=catalogue), job, catalogue)
    return Question(job, Cluster(pools, catalogue), measurements)


def losses(
    running: RunningPlan, nodes: Sequence[PlannerNode], *, count: int, repeat: int
) -> Losses:
    """Yield the cluster after the loss of random sets of nodes that the plan uses."""
    rng = random.Random(f"{count} of {len(nodes)}")
    used = sorted(nodes_used(running.plan))
    gone = [set(rng.sample(used, count)) for _ in range(repeat)]
    return [tuple(node for node in nodes if node.id not in lost) for lost in gone]


def row(
    name: str, ask: Callable[[Sequence[PlannerNode]], Replan], left: Losses, running: RunningPlan
) -> tuple[list[str], float]:
    """One line of the table, and the median of this process's own seconds."""
    wall, own, slower = [], [], []
    for live in left:
        began, began_own = time.perf_counter(), time.process_time()
        found = ask(live)
        wall.append(time.perf_counter() - began)
        own.append(time.process_time() - began_own)
        if found.estimate is not None:
            slower.append(found.estimate.iteration_s / running.estimate.iteration_s - 1)
    cuts = [quantile(times, share) for times in (wall, own) for share in (0.5, 0.99)]
    line = [
        name,
        str(len(wall)),
        *(f"{1e3 * seconds:.2g}" for seconds in cuts),
        f"{statistics.mean(slower):+.1%}" if slower else "-",
    ]
    return line, quantile(own, 0.5)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--model", choices=sorted(MODELS), default="opt-350m")
    parser.add_argument("--repeat", type=int, default=200)
    given = parser.parse_args()
    asked = question(given.model, given.profiles)
    began = time.perf_counter()
    answer = plan_job(asked)
    search_s = time.perf_counter() - began
    assert answer.plan is not None
    nodes = nodes_of(asked.cluster)
    replanner = Replanner(asked.job, asked.cluster, asked.measurements)
    placed = replanner.place(answer.plan, nodes)
    assert placed is not None
    began = time.perf_counter()
    running = replanner.prepare(placed, nodes)
    look_s = time.perf_counter() - began
    began = time.process_time()
    ready = Precomputed(replanner, running, nodes).all()
    ahead_s = time.process_time() - began
    used = len(nodes_used(running.plan))
    gpus = sum(node.gpus for node in nodes)
    print(f"{given.model} on {gpus} GPUs, {len(nodes)} nodes, of which {used} are used")
    print(f"search from nothing {search_s:.2f} s, making ready {look_s:.2f} s")
    print(
        f"precomputing {len(ready.by_loss)} losses takes {ahead_s:.2f} s of its own:"
        f" {len(ready.roles)} kinds of nodes\n"
    )
    one = losses(running, nodes, count=1, repeat=given.repeat)
    zones = sorted({node.zone for node in nodes if node.id in ready.used})
    gone = [tuple(node for node in nodes if node.zone != zone) for zone in zones]

    def drop(live: Sequence[PlannerNode]) -> Replan:
        return replanner.replan(running, live, budget=1)

    def now(live: Sequence[PlannerNode]) -> Replan:
        return replanner.replan(running, live)

    cases = [
        ("a node, precomputed", ready.after, one),
        ("a node, dropped", drop, one),
        ("a node", now, one),
        ("three nodes", now, losses(running, nodes, count=3, repeat=given.repeat // 4)),
        ("a zone, precomputed", ready.after, gone),
        ("a zone", now, gone),
    ]
    lines, medians = zip(*(row(*case, running) for case in cases), strict=True)
    rows = [
        [*line, f"{median / medians[0]:.0f}"] for line, median in zip(lines, medians, strict=True)
    ]
    header = ["lost", "times", "p50 ms", "p99 ms", "own p50", "own p99", "slower", "x"]
    print(table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
