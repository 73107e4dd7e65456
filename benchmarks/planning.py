"""How long sailord waits for its planner when a node is lost: precomputed, warm, and cold.

    python -m benchmarks.planning [--profiles DIR] [--nodes N] [--repeat N]

The cluster is that of ``replan.py`` (512 GPUs of two kinds in three zones, 128 nodes) unless
``--nodes`` asks for fewer. Wall-clock times, messages between processes included; in rows with
``start`` the planner process is started first.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from agents.protocol.records import NodeId, NodeRecord
from benchmarks.replan import POOLS, ZONES, quantile
from sailord.planning.messages import FoundPlan, PlanRequest
from sailord.planning.pool import PlannerPool
from sailord.text.table import table

JOB = """[model]
preset = "opt-350m"
[training]
global_batch = 1024
sequence = 2048
precision = "fp32"
optimizer = "adam"
max_tp = 4
"""
TIMEOUT_S = 300.0


def records(count: int) -> tuple[NodeRecord, ...]:
    """Nodes of four GPUs, the zones and kinds in turn."""
    nodes = []
    for zone in ZONES:
        for gpu, (gpus, _) in POOLS.items():
            many = gpus + 8 * (zone == ZONES[0] and gpu == "A100-40")
            nodes += [(zone, gpu, number) for number in range(many // 4)]
    nodes = nodes[:: max(len(nodes) // count, 1)][:count]
    return tuple(
        NodeRecord(
            NodeId(f"{zone}.{gpu}.{n}"), f"{zone}.{gpu}.{n}", zone, f"{gpu}x4", gpu, 4, "h:1"
        )
        for zone, gpu, n in nodes
    )


def cluster_file(folder: Path) -> Path:
    """The pools of these nodes, with prices."""
    text = "".join(
        f'[[pool]]\nzone = "{zone}"\ngpu = "{gpu}"\nmachine = "{gpu}x4"\ngpus_per_machine = 4\n'
        f"gpus = {gpus + 8 * (zone == ZONES[0] and gpu == 'A100-40')}\n"
        f"price_usd_per_gpu_hour = {price}\n\n"
        for zone in ZONES
        for gpu, (gpus, price) in POOLS.items()
    )
    file = folder / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    return file


async def timed(service: PlannerPool, request: PlanRequest) -> tuple[float, FoundPlan]:
    """How long the answer takes, and the answer."""
    began = time.perf_counter()
    found = await service.ask(request, timeout_s=TIMEOUT_S)
    took_s = time.perf_counter() - began
    assert isinstance(found, FoundPlan), found
    return took_s, found


async def measure(first: PlanRequest, repeat: int) -> list[list[str]]:
    """One line for each way to be asked."""
    service = PlannerPool()
    try:
        took_s, found = await timed(service, first)
        rows = [["a first plan, start", "1", *cells([took_s])]]
        running = replace(first, running=found.plan, ran_on=first.nodes)
        members = sorted(found.proposal.members)[:repeat]
        left = [
            replace(running, nodes=tuple(n for n in first.nodes if n.id != id_)) for id_ in members
        ]
        fresh = PlannerPool()
        took_s, _ = await timed(fresh, left[0])
        fresh.close()
        rows.append(["a lost node, start", "1", *cells([took_s])])
        took_s, _ = await timed(service, left[0])
        rows.append(["a lost node, no tables", "1", *cells([took_s])])
        rows.append(
            ["a lost node, with tables", str(len(left)), *cells(await all_of(service, left))]
        )
        began = time.perf_counter()
        service.precompute(running)
        while service.precomputed_losses < len(found.proposal.members):
            await asyncio.sleep(0.05)
        ahead_s = time.perf_counter() - began
        rows.append(
            ["a lost node, precomputed", str(len(left)), *cells(await all_of(service, left))]
        )
        print(f"looking ahead: {service.precomputed_losses} losses in {ahead_s:.1f} s")
        return rows
    finally:
        service.close()


async def all_of(service: PlannerPool, questions: list[PlanRequest]) -> list[float]:
    """Ask one after the other."""
    return [(await timed(service, question))[0] for question in questions]


def cells(seconds: list[float]) -> list[str]:
    """Median and the slowest of a hundred, in milliseconds."""
    return [f"{1e3 * quantile(seconds, share):.3g}" for share in (0.5, 0.99)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=40)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first = PlanRequest(
            JOB, cluster_file(Path(folder)), given.profiles, records(given.nodes), None, ()
        )
        rows = asyncio.run(measure(first, given.repeat))
    print(table(("question", "asked", "p50 ms", "p99 ms"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
