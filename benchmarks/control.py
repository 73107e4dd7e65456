"""The control plane with thousands of nodes: ``python -m benchmarks.control [--nodes N]``.

A real sailord and a real store serve agents that behave as real ones: each keeps a lease, reads
the generation, watches the store, and sends signed reports over HTTP. Only their workers are
simulated, at one step a second. After some time without events, some nodes get a notice at the
same moment.

The exit status is 3 if a target was missed; the last lines say which.

The agents run in two processes, and in each the first one watches and reads the store for all;
on machines of their own, each would do that for itself.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from agents.core.model import Event, GenerationRead, LeaseEnded
from agents.daemon.clock import Clock
from agents.protocol.records import (
    Fence,
    GenerationRecord,
    Holding,
    NodeId,
    NodeRecord,
    Order,
    Point,
    Report,
    Sealed,
)
from agents.protocol.store_keys import Keys
from agents.registration import Registration
from agents.report_sender import ReportSender
from agents.rpc.client import SignedClient
from agents.rpc.signing import ClusterKey
from agents.store.factory import open_store
from benchmarks.machine import TARGET_MISSED, report_stolen_time
from sailord.local.paths import free_port
from tests.control import cluster

ROOT = Path(__file__).resolve().parents[1]
KEY = b"k" * 64
CLUSTER = "bench"
TOKEN = "t" * 32
STEP_S = 1.0
LEASE_S = 10.0
PLANS_MAX, DECISION_MS, WAITED_MS, MEMORY_MB = 1, 10.0, 200.0, 300.0
"""The targets, for 2,000 nodes of which 200 get their notice."""
JOIN_S = 0.02
"""Time between the starts of two agents: starting costs far more than running."""
CONNECTIONS = 20
"""Connections to the store, for each process of agents."""
PROCESSES = 2
LAYERS, PIECES, STAGES = 27, 2, 9
"""The job's layers and pieces; each node holds the layers of one stage."""
JOB = cluster.JOB.replace("batch = 128", "batch = 16384").replace("max_tp = 2", "max_tp = 1")


class Agent:
    """One node of one GPU, without workers."""

    def __init__(
        self, number: int, store: Any, session: aiohttp.ClientSession, first: Agent | None
    ) -> None:
        self.place, name = number, f"n{number:05}"
        self.others: list[Agent] = []
        """The agents that this one reads the store for, itself included."""
        self.node = NodeRecord(
            NodeId(f"{name}.1"), name, "us-central1-b", "A100-40x1", "A100-40", 1,
            f"127.0.0.1:{9}", "ready",
        )  # fmt: skip
        self.registration = Registration(store, Keys(CLUSTER), LEASE_S, Clock(), self.on_event)
        self.reader = self if first is None else first
        self.reader.others.append(self)
        self.sender = ReportSender(
            SignedClient(session, ClusterKey(CLUSTER, (KEY,))),
            lambda: self.reader.registration.leader,
        )
        self.record: GenerationRecord | None = None
        self.begun = self.number = 0.0
        self.stopped_at: int | None = None
        self.heard = Fence(0, 0)

    async def run(self, rank: int) -> None:
        """Live until cancelled."""
        await asyncio.sleep(rank * JOIN_S)
        self.registration.register(self.node)
        async with asyncio.TaskGroup() as group:
            works = [
                self.registration.keep_registered(),
                self.registration.store_orders(),
                self.sender.run(),
                self.report(),
            ]
            if self.reader is self:
                works.append(self.registration.poll(self.node.id, lambda: None, lambda *_: None))
                works.append(self.registration.watch())
            for work in works:
                group.create_task(work)

    def on_event(self, event: Event) -> None:
        if isinstance(event, LeaseEnded):
            self.registration.register(self.node)
        if isinstance(event, GenerationRead) and event.record is not None:
            for each in self.others:
                each.follow(event.record)

    def follow(self, record: GenerationRecord) -> None:
        """Take part in the generation, and park when told to stop."""
        before, self.record = self.record, record
        self.heard = Fence(record.term, record.number)
        if before is None or before.number != record.number:
            self.begun, self.stopped_at = time.monotonic(), None
            self.send_report()
        elif record.state == "stopping" and self.stopped_at is None:
            # Workers agree on a step; these use one that none has reached yet.
            self.stopped_at = (record.stop_at or 0) + 2
            self.send_report()

    async def report(self) -> None:
        while True:
            self.send_report()
            await asyncio.sleep(STEP_S)

    def send_report(self) -> None:
        record, self.number = self.record, self.number + 1
        at_once = int(time.time() * 1e3) + int(self.number)
        if record is None or record.state == "closed" or self.node.id not in record.members:
            self.sender.send(Report(self.node.id, at_once, self.heard))
            return
        done = int((time.monotonic() - self.begun) / STEP_S)
        step = self.stopped_at or record.restore.point.step + done
        stage = self.place % STAGES
        holds = tuple(Holding(layer, 0, PIECES) for layer in range(stage, LAYERS, STAGES))
        self.sender.send(
            Report(
                self.node.id, at_once, self.heard, record.number,
                "running" if self.stopped_at is None else "stopped", step,
                (Sealed(Point(step, record.number), holds),),
                job=record.job,
            )
        )  # fmt: skip

    def notice(self) -> None:
        """Send a notice of two minutes."""
        leaves_at = time.time() + 120
        self.registration.register(replace(self.node, state="draining", leaves_at=leaves_at))
        order = Order(f"gone-{self.node.id}", "preempt", self.node.id, leaves_at)
        self.registration.store_order(order)


def run_agents(
    url: str, first: int, last: int, orders: multiprocessing.connection.Connection
) -> None:
    """Run these agents until the parent ends the process."""
    os.nice(5)  # Lower priority: on machines of their own, agents would not take sailord's time.
    asyncio.run(_run_agents(url, first, last, orders))


async def _run_agents(
    url: str, first: int, last: int, orders: multiprocessing.connection.Connection
) -> NoReturn:
    stores = [await open_store(url) for _ in range(CONNECTIONS)]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        agents: list[Agent] = []
        for i in range(first, last):
            reader = agents[0] if agents else None
            agents.append(Agent(i, stores[i % CONNECTIONS], session, reader))
        tasks = [asyncio.create_task(agent.run(i)) for i, agent in enumerate(agents)]
        while True:
            asked = asyncio.create_task(asyncio.to_thread(orders.recv))
            await asyncio.wait([asked, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # Agents run until the end, so this raises the agent's error.
            names = await asked
            for agent in agents:
                if agent.node.name in names:
                    agent.notice()


# ---- the measuring side -------------------------------------------------------------------------


class Head:
    """A real sailord, asked over its Unix socket."""

    def __init__(self, folder: Path, store: str) -> None:
        (folder / "key").write_bytes(KEY)
        (folder / "key").chmod(0o600)
        (folder / "token").write_text(TOKEN)
        (folder / "token").chmod(0o600)
        self.port = free_port()
        own = "" if store.startswith("unix") else f'store = "{store}"\n'
        (folder / "sailord.toml").write_text(
            f'cluster_name = "{CLUSTER}"\nstate = "state"\nkey = "key"\n{own}'
            f'cluster = "{ROOT}/examples/three-zones.toml"\n[listen]\nport = {self.port}\n'
            'token_file = "token"\n'
        )
        command = [sys.executable, "-m", "sailord.main", "run", "--config"]
        self.log = folder / "sailord.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, folder / "sailord.toml"], cwd=ROOT, stdout=log, stderr=log
            )
        self.socket = folder / "state" / "sailord.sock"

    def ask(self, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("localhost", timeout=30)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(30)
        connection.sock.connect(str(self.socket))
        method, raw = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, path, raw)
        text = connection.getresponse().read().decode()
        connection.close()
        return text if path == "/metrics" else json.loads(text)

    def figures(self) -> dict[str, float]:
        return {
            name: float(value)
            for name, value in re.findall(r"^(sailor_\S+) (\S+)$", self.ask("/metrics"), re.M)
        }

    def status(self) -> str:
        return json.dumps(self.ask("/v1/status"))[:2000]

    def last_words(self) -> list[str]:
        """Return the end of its log."""
        return self.log.read_text().splitlines()[-40:]

    def busy_s(self) -> float:
        """Return the processor time of the process itself, without its planners."""
        text = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(text[11]) + int(text[12])) / os.sysconf("SC_CLK_TCK")


def wait_until(holds: Callable[[], Any], *, within_s: float = 300.0) -> float:
    """Return how long it took."""
    begun = time.monotonic()
    while time.monotonic() < begun + within_s:
        try:
            if holds():
                return time.monotonic() - begun
        except (OSError, KeyError, TypeError):
            pass
        time.sleep(0.1)
    raise TimeoutError


def run_store(kind: str, folder: Path, stack: ExitStack) -> str:
    """Start an etcd, or return the socket of sailord's embedded store."""
    if kind == "embedded":
        return f"unix://{folder}/state/store.sock"
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    process = subprocess.Popen(
        ["etcd", "--data-dir", folder / "etcd", "--listen-client-urls", client,
         "--advertise-client-urls", client, "--listen-peer-urls", peer],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.kill)
    return client.replace("http", "etcd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--notices", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=15.0)
    is_there = shutil.which("etcd") is not None
    parser.add_argument(
        "--store", choices=("etcd", "embedded"), default="etcd" if is_there else "embedded"
    )
    options = parser.parse_args()
    with report_stolen_time():
        missed = run(options)
    sys.exit(TARGET_MISSED if missed else 0)


def run(options: argparse.Namespace) -> list[str]:
    """Print what was measured; return the targets that were missed."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sailor-")))
        url = run_store(options.store, folder, stack)
        head = Head(folder, url)
        stack.callback(head.process.wait)
        stack.callback(head.process.terminate)
        try:
            lines, missed = measure(head, begin_agents(url, options.nodes, stack), options)
        except TimeoutError:
            print(head.status(), *head.last_words(), "a step took too long; see above", sep="\n")
            return ["the job did not run to its end"]
        print(f"{options.nodes} nodes, {options.store}")
        for name, value in lines:
            print(f"  {name:<44}{value}")
        print("the job's history:")
        for line in head.ask("/v1/jobs/j/history")["history"]:
            print(f"  {line['text'][:110]}")
    for each in missed:
        print(f"missed: {each}")
    return missed


def begin_agents(url: str, nodes: int, stack: ExitStack) -> list[Any]:
    context, pipes = multiprocessing.get_context("spawn"), []
    for i in range(PROCESSES):
        ours, theirs = context.Pipe()
        first, last = (nodes * j // PROCESSES for j in (i, i + 1))
        process = context.Process(target=run_agents, args=(url, first, last, theirs), daemon=True)
        process.start()
        stack.callback(ours.close)  # Not before: agents fail when their pipe ends.
        stack.callback(process.join)
        stack.callback(process.kill)  # Ending a thousand agents cleanly takes minutes.
        pipes.append(ours)
    return pipes


def measure(head: Head, agents: list[Any], options: Any) -> tuple[list[tuple[str, str]], list[str]]:
    joined_s = wait_until(lambda: head.ask("/v1/status")["nodes"].get("ready") == options.nodes)
    time.sleep(options.seconds / 2)
    head.ask("/v1/jobs", {"job": JOB, "id": "j"})
    running_s = wait_until(lambda: head.ask("/v1/status")["job"]["phase"]["name"] == "running")
    time.sleep(options.seconds / 2)
    before, busy = head.figures(), head.busy_s()
    time.sleep(options.seconds)
    rest = head.figures()
    at_rest = (head.busy_s() - busy) / options.seconds
    rate = (rest["sailor_decisions_total"] - before["sailor_decisions_total"]) / options.seconds
    members = head.ask("/v1/status")["job"]["members"][: options.notices]
    for pipe in agents:
        pipe.send(frozenset(members))

    def has_moved() -> bool:
        job = head.ask("/v1/status")["job"]
        return job["phase"]["name"] == "running" and not set(members) & set(job["members"])

    try:
        moved_s = f"{wait_until(has_moved, within_s=120):.1f} s"
    except TimeoutError:
        moved_s = "not within two minutes"
    after = head.figures()
    plans = _count_gained(before, after, "sailor_plans_total")
    decision_ms = 1e3 * quantile(rest, after, "sailor_decision_seconds", 0.99)
    waited_ms = 1e3 * quantile(rest, after, "sailor_event_to_decision_seconds", 0.99)
    memory_mb = after["sailor_memory_peak_bytes"] / 1e6
    missed = [
        f"{name}: {value:.2f}, and not {most:.0f} at most"
        for name, value, most in (
            ("plans", plans, PLANS_MAX),
            ("a decision, p99, in ms", decision_ms, DECISION_MS),
            ("event to decision, p99, in ms", waited_ms, WAITED_MS),
            ("memory, in MB", memory_mb, MEMORY_MB),
        )
        if value > most
    ]
    return [
        ("all registered after", f"{joined_s:.1f} s"),
        ("the job runs after", f"{running_s:.1f} s"),
        ("events decided a second, at rest", f"{rate:.0f}"),
        ("a decision, at rest, p50 and p99", _ms(before, rest, "sailor_decision_seconds")),
        ("event to decision, at rest, p50 and p99",
         _ms(before, rest, "sailor_event_to_decision_seconds")),
        ("sailord's share of one core, at rest", f"{at_rest:.0%}"),
        (f"{len(members)} notices lead to", f"{plans} plan"),
        ("and to generations", f"{_count_gained(before, after, 'sailor_generation')}"),
        ("all runs without them after", moved_s),
        ("a decision, meanwhile, p99", f"{decision_ms:.2f} ms"),
        ("event to decision, meanwhile, p99", f"{waited_ms:.2f} ms"),
        ("most memory of sailord", f"{memory_mb:.0f} MB"),
    ], missed  # fmt: skip


def _ms(before: dict[str, float], after: dict[str, float], name: str) -> str:
    return ", ".join(f"{1e3 * quantile(before, after, name, q):.2f} ms" for q in (0.5, 0.99))


def quantile(before: dict[str, float], after: dict[str, float], name: str, q: float) -> float:
    """Return a quantile of a histogram between two scrapes, interpolated within its bucket."""
    counts = {
        float(bound): after[f'{name}_bucket{{le="{bound}"}}']
        - before[f'{name}_bucket{{le="{bound}"}}']
        for bound in re.findall(rf'{name}_bucket{{le="([^"]+)"}}', "\n".join(after))
    }
    wanted, below, low = q * max(counts.values()), 0.0, 0.0
    for bound, count in sorted(counts.items()):
        if count >= wanted and count > below:
            high = low if bound == float("inf") else bound
            return low + (high - low) * (wanted - below) / (count - below)
        below, low = count, bound
    return 0.0


def _count_gained(before: dict[str, float], after: dict[str, float], name: str) -> int:
    return round(after[name] - before[name])


if __name__ == "__main__":
    main()
