"""Runs the ranks of a plan for real, each in the network namespace of its node.

As ``python -m worker run`` does, but across the nodes of a shaped cluster: the same trainer and the
same gloo groups, over the router's delays and rates.
"""

from __future__ import annotations

import os
import resource
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

from agents.daemon.namespaces import enter_network_namespace
from benchmarks.machine import put_ahead
from sailord.local.shaped_network import NodeAddress, ShapedNetwork
from sailord.local.zone_file import Zones
from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.cli.local_launcher import SendMessage, run_ranks
from worker.data.batch import DataSource
from worker.distributed.interface import Transport
from worker.distributed.process_groups import ProcessTransport
from worker.distributed.rendezvous import serve_store
from worker.distributed.single_rank import SingleRankTransport
from worker.layer_profiles.device import peak_of
from worker.layout.rank_layout import rank_places
from worker.profiling.activity_board import ActivityBoard
from worker.profiling.compute_time import ComputeTimer, core_seconds
from worker.profiling.timeline import Recorder
from worker.training.trainer import RankTrainer

WARM_UP = 4
"""Steps that are not timed: connections open, and allocations of the first two are traced."""
TRACED = 1
"""Steps at the end whose events are kept."""
WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class ShapedRank:
    """Where a rank runs."""

    node: str
    address: NodeAddress
    times_slower: float


@dataclass(slots=True)
class Measured:
    """What a run of a plan showed."""

    step_s: list[float] = field(default_factory=list)
    """Seconds of each step that counts."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    bytes_per_step: dict[tuple[str, str], float] = field(default_factory=dict)
    """Bytes by sending and receiving node, headers and acknowledgements included."""
    others: float = 0.0
    """The share of the cores' time that processes other than the run's took."""
    stolen: float = 0.0
    """The share of the cores' time that the host gave to other machines."""

    @property
    def iteration_s(self) -> float:
        """The median step."""
        return statistics.median(self.step_s)

    @property
    def waited(self) -> float:
        """The longest wait of a rank for a core, as a share of the step."""
        return max(float(rank["core_wait_s"]) for rank in self.ranks) / self.iteration_s

    @property
    def spread(self) -> float:
        """Half the interquartile range over the median."""
        low, _, high = statistics.quantiles(self.step_s, n=4)
        return (high - low) / 2 / self.iteration_s


@contextmanager
def shaped_network(
    zones: Zones, folder: Path
) -> Iterator[tuple[ShapedNetwork, dict[str, NodeAddress]]]:
    """Run a router with a namespace for each node of the zones."""
    with (folder / "router.log").open("ab") as log:
        router = Popen(
            [sys.executable, "-m", "sailord.local.router"], stdin=PIPE, stdout=PIPE, stderr=log
        )
    put_ahead(router.pid, priority=2)
    network = ShapedNetwork(zones, router)
    try:
        network.begin()
        addresses = {}
        for zone in zones.zones.values():
            for number in range(1, zone.nodes + 1):
                name = f"{zone.name[-1]}{number}"
                addresses[name] = network.add_node(name, zone.name, zone.nic_mbit_per_s)
        yield network, addresses
    finally:
        for end in (router.stdin, router.stdout):
            if end is not None:
                end.close()
        router.wait()


def run_plan(
    job: Job,
    plan: Plan,
    data: DataSource,
    ranks: list[ShapedRank],
    network: ShapedNetwork,
    *,
    steps: int,
    port: int,
) -> Measured:
    """Train some steps under a plan; one of ``ranks`` for each of its ranks."""
    found = Measured(ranks=[{} for _ in ranks])
    begun: dict[str, Any] = {}

    def on_message(rank: int, message: dict[str, Any]) -> None:
        if message["kind"] == "step":
            found.step_s.append(message["seconds"])
        elif message["kind"] == "begin":
            begun.update(bytes=network.bytes_sent(), machine=_machine(), own=_own_s())
        elif message["kind"] == "end":
            _take(found, network, begun, steps)
        else:
            found.ranks[rank] = message

    def body(rank: int, send: SendMessage) -> None:
        _train(job, plan, data, ranks, rank, steps, port, send)

    run_ranks(body, ranks=len(ranks), board=ActivityBoard(len(ranks)), on_message=on_message)
    return found


def _take(found: Measured, network: ShapedNetwork, begun: Mapping[str, Any], steps: int) -> None:
    for ends, count in network.bytes_sent().items():
        sent = count - begun["bytes"].get(ends, 0)
        if sent:
            found.bytes_per_step[ends] = sent / steps
    busy, stolen, total = (
        after - before for before, after in zip(begun["machine"], _machine(), strict=True)
    )
    own = _own_s() - begun["own"]
    found.others = max(busy - own, 0.0) / total
    found.stolen = stolen / total


def _machine() -> tuple[float, float, float]:
    """Return the seconds that all cores were busy, stolen, and there, since the boot."""
    words = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0].split()[1:9]
    user, nice, system, idle, iowait, irq, softirq, steal = (
        int(word) / os.sysconf("SC_CLK_TCK") for word in words
    )
    busy = user + nice + system + irq + softirq
    return busy, steal, busy + steal + idle + iowait


def _own_s() -> float:
    """Return the processor seconds of this process, its ranks and the router."""
    tick = os.sysconf("SC_CLK_TCK")
    me = os.getpid()
    total = 0.0
    for each in (*_children(me), me):
        try:
            text = Path(f"/proc/{each}/stat").read_text(encoding="ascii")
        except OSError:
            continue
        words = text.rpartition(")")[2].split()
        total += (int(words[11]) + int(words[12])) / tick
    return total


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(word) for word in text.split()]


# -- in a rank's process -------------------------------------------------------------------------


def _train(
    job: Job,
    plan: Plan,
    data: DataSource,
    ranks: list[ShapedRank],
    rank: int,
    steps: int,
    port: int,
    send: SendMessage,
) -> None:
    own = ranks[rank]
    put_ahead()
    enter_network_namespace(own.address.namespace)
    torch.set_num_threads(1)
    transport = connect(rank, [each.address.address for each in ranks], port)
    recorder = Recorder(rank)
    timer = ComputeTimer(times_slower=lambda: own.times_slower)
    trainers: list[RankTrainer] = []

    def begin() -> None:
        trainers.append(
            RankTrainer(job, plan, rank, transport, data, recorder=recorder, busy=timer)
        )
        for _ in range(2):
            trainers[0].step()

    _, tensors = peak_of(begin)
    trainer = trainers[0]
    for _ in range(WARM_UP - 2):
        trainer.step()
    if rank == 0:
        send({"kind": "begin"})
    before = resource.getrusage(resource.RUSAGE_SELF)
    waited, ended = core_seconds()[1], time.perf_counter()
    for _ in range(steps):
        trainer.step()
        now = time.perf_counter()
        if rank == 0:
            send({"kind": "step", "seconds": now - ended})
        ended = now
    after = resource.getrusage(resource.RUSAGE_SELF)
    if rank == 0:
        send({"kind": "end"})
    waited = core_seconds()[1] - waited
    recorder.keeps_spans = True
    for _ in range(TRACED):
        trainer.step()
    transport.close()
    send(
        {
            "kind": "rank",
            "node": own.node,
            "tensor_bytes": tensors,
            "processor_s": (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            / steps,
            "core_wait_s": waited / steps,
            "busy_s": timer.typical_s,
            "place": asdict(rank_places(plan)[rank]),
            "spans": [asdict(span) for span in recorder.spans],
        }
    )


def connect(rank: int, addresses: list[str], port: int) -> Transport:
    """Connect the ranks at these addresses."""
    if len(addresses) == 1:
        return SingleRankTransport()
    if rank == 0:
        store: Store = serve_store(socket.create_server((addresses[0], port)), WITHIN_S)
    else:
        timeout = timedelta(seconds=WITHIN_S)
        store = TCPStore(addresses[0], port, is_master=False, timeout=timeout)
    return ProcessTransport(store, rank, len(addresses), host=addresses[rank], deadline_s=WITHIN_S)


# -- this host ------------------------------------------------------------------------------------

SIZES = tuple(1024 * 4**power for power in range(7))
"""Bytes of the all-reduces within a node."""
ROUNDS = 30


def measure_host(node: NodeAddress, port: int) -> dict[str, Any]:
    """Measure what the ranks of one node take for messages between them."""
    found: list[dict[str, Any]] = []

    def body(rank: int, send: SendMessage) -> None:
        put_ahead()
        enter_network_namespace(node.namespace)
        torch.set_num_threads(1)
        transport = connect(rank, [node.address] * 2, port)
        group = transport.group((0, 1))
        seconds = []
        for size in SIZES:
            values = torch.zeros(size // 4)
            taken = []
            for _ in range(ROUNDS):
                group.all_reduce(torch.zeros(1))
                begun = time.perf_counter()
                group.all_reduce(values)
                taken.append(time.perf_counter() - begun)
            seconds.append(statistics.quantiles(taken, n=4)[0])
        transport.close()
        send({"kind": "all-reduce", "seconds": seconds})

    run_ranks(
        body,
        ranks=2,
        board=ActivityBoard(2),
        on_message=lambda rank, message: found.append(message) if rank == 0 else None,
    )
    return {"all_reduce_bytes": list(SIZES), "all_reduce_s": found[0]["seconds"]}
