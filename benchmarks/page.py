"""The page in a browser with thousands of nodes: ``python -m benchmarks.page [--nodes N]``.

The page's files, and the document and patches that sailord makes of its state, are served to a
headless Chromium. The state is made up: all nodes train, at a step a second, and every 5 s one of
them gets a notice. It prints the first paint, the time until every node is drawn, the bytes until
then and in a minute, and sailord's processor time for the document.

``python -m benchmarks.page --preemptions N`` runs a sailord and four emulated nodes that train, and
prints how long after a node's notice the page shows that it leaves, and who computes instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from agents.protocol.records import (
    Fence,
    GenerationRecord,
    JobId,
    JobRecord,
    NodeId,
    NodeRecord,
    Point,
    Report,
    Restore,
)
from benchmarks.machine import report_stolen_time
from sailord.api.answers.goodput import goodput_view
from sailord.api.answers.live import NodeRows, Surroundings, live_document
from sailord.api.answers.types import StoreView
from sailord.api.handlers.live import LOOK_S
from sailord.api.handlers.page import page, page_file
from sailord.controller.step_rate import StepRate
from sailord.core.model.nodes import Exclusion, Node, Nodes
from sailord.core.model.phases import Running
from sailord.core.model.state import Active, Progress, State
from sailord.goodput.core.ledger import Ledger, fold
from sailord.goodput.core.sight import sight_of
from sailord.page.merge_patch import merge_patch
from tests.control.cluster import Cluster
from tests.processes import wait_until
from tests.sailord.daemon.running import TOKEN, Place
from tests.sailord.page.browser import Tab, open_browser

JOB, STAGES, NOTICE_S = JobId("job"), 8, 5
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
TRAINS = "#map .node[data-works=yes]"
AFTER_NOTICE = """
window.shown = new Promise(done => {
  const box = document.getElementById('map'), at = [];
  new MutationObserver((_, watch) => {
    if (!at.length && box.querySelector('[data-mood=leave]')) at.push(Date.now());
    if (at.length && box.querySelectorAll('.node[data-works=yes]').length === 3) {
      watch.disconnect();
      done([...at, Date.now()]);
    }
  }).observe(box, {subtree: true, attributes: true, childList: true});
}); 1
"""
"""When the map changed; what a frame takes until it is painted is not in it."""
LONG_TASKS = (
    "window.busy = []; new PerformanceObserver(list => window.busy.push("
    "...list.getEntries().map(e => e.duration))).observe({type: 'longtask'}); 1"
)


@dataclass(eq=False)
class MadeUp:
    """A made-up cluster that trains, at some time after its start."""

    count: int
    begun: float = field(default_factory=time.time)
    rows: NodeRows = field(default_factory=NodeRows)
    ledger: Ledger = field(default_factory=Ledger)
    costs_s: list[float] = field(default_factory=list)
    """Processor time of each document."""

    def __post_init__(self) -> None:
        self.records = [
            NodeRecord(NodeId(f"n{i:05}.1"), f"n{i:05}", f"zone-{i % 4}", "a2-highgpu-1g",
                       "A100-40", 1, "h:1", "ready")
            for i in range(self.count)
        ]  # fmt: skip
        members = tuple(record.id for record in self.records)
        point = Restore(Point(0, 0), "start")
        self.generation = GenerationRecord(
            JOB, 1, "open", "sha", members, point, 1, "nothing was planned yet", step_s=1.0
        )
        stages = [
            {"layers": [4 * s, 4 * s + 4], "tp": 1, "gpu": "A100-40", "zone": "zone-0"}
            for s in range(STAGES)
        ]
        self.plan = {
            "micro_batch_size": 1,
            "pipelines": [
                {
                    "micro_batches": 16,
                    "stages": [
                        {**stage, "node": id_, "devices": [0]}
                        for stage, id_ in zip(stages, members[p : p + STAGES], strict=False)
                    ],
                }
                for p in range(0, self.count, STAGES)
            ],
        }

    def state(self) -> State:
        """The state now."""
        now = time.time()
        step, leaving = int(now - self.begun), int((now - self.begun) / NOTICE_S)
        nodes = Nodes()
        for number, record in enumerate(self.records):
            said = Report(record.id, step, Fence(1, 1), 1, "running", step, job=JOB,
                          loss=5 / (1 + step))  # fmt: skip
            node = Node(record, self.begun, said, now)
            if number < leaving:
                node = replace(node, exclusion=Exclusion(draining_since=now))
            nodes[record.id] = node
        active = Active(JOB, Running(self.begun), self.generation, progress=Progress(step, now))
        jobs = {JOB: JobRecord(JOB, "running", steps=100_000)}
        return State(now=now, term=1, nodes=nodes, jobs=jobs, active=active)

    def document(self) -> dict[str, Any]:
        """The document now; its cost is noted."""
        state = self.state()
        begun = time.process_time()
        self.ledger = fold(self.ledger, sight_of(state, lambda _: 3.0))
        about = Surroundings(self.plan, {}, StepRate(), {}, goodput_view(self.ledger), None,
                             StoreView(True, None), "head", ())  # fmt: skip
        found = live_document(state, self.rows, about)
        self.costs_s.append(time.process_time() - begun)
        return found

    async def live(self, request: web.Request) -> web.StreamResponse:
        """Stream the document and its patches, as sailord does."""
        reply = web.StreamResponse()
        reply.content_type = "text/event-stream"
        await reply.prepare(request)
        known: dict[str, Any] = {}
        hello = {"cluster": "bench", "name": "", "role": "viewer", "now": time.time()}
        await reply.write(f"event: hello\ndata: {json.dumps(hello)}\n\n".encode())
        with contextlib.suppress(ConnectionError):  # The browser was closed.
            while True:
                document = self.document()
                patch, known = merge_patch(known, document), document
                if patch:
                    text = json.dumps(patch, separators=(",", ":"))
                    await reply.write(f"event: patch\ndata: {text}\n\n".encode())
                await asyncio.sleep(LOOK_S)
        return reply


async def _nothing(_: web.Request) -> web.Response:
    """Answer the page's other requests: no moves, no schedule."""
    return web.json_response({"moves": [], "sha256": "sha", "timeline": None})


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--preemptions", type=int, default=0, metavar="N")
    options = parser.parse_args()
    with report_stolen_time():
        if options.preemptions:
            _preempt(options.preemptions)
        else:
            asyncio.run(_measure(options.nodes, options.seconds))


def _preempt(times: int) -> None:
    """Announce preemptions to a cluster that trains, and time the page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        cluster = Cluster(folder, [Place(folder)])
        try:
            cluster.begin("a1", "a2", "b1", "b2")
            asyncio.run(_time_notices(cluster, times))
        finally:
            cluster.end()


async def _time_notices(cluster: Cluster, times: int) -> None:
    def all_ready() -> bool:
        return bool(cluster.head.status()["nodes"].get("ready") == 4)

    leaves: list[float] = []
    moved: list[float] = []
    async with open_browser(cluster.folder) as tab:
        await tab.screen(1280, 900)
        await tab.open(f"http://127.0.0.1:{cluster.head.port}/#token={TOKEN}")
        for _ in range(times):
            await asyncio.to_thread(wait_until, all_ready, within_s=120)
            await asyncio.to_thread(wait_until, cluster.is_running, within_s=120)
            await tab.wait(f"document.querySelectorAll({TRAINS!r}).length === 4", within_s=120)
            await tab.run(AFTER_NOTICE)
            ordered_ms = time.time() * 1e3
            code, said = await asyncio.to_thread(
                cluster.head.ask, "POST", "/v1/nodes/b2/preempt", {"reason": "benchmark"}
            )
            assert code == 202, said
            shown = await tab.run("window.shown")
            leaves.append(shown[0] - ordered_ms)
            moved.append(shown[1] - ordered_ms)
            await asyncio.to_thread(cluster.head.ask, "POST", "/v1/nodes/b2/withdraw", {})
    print(f"{times} preemptions, ms after the order: median, most")
    for what, found in (("shows that the node leaves", leaves), ("the plan without it", moved)):
        print(f"  {what:<44}{statistics.median(found):.0f}, {max(found):.0f}")


async def _measure(nodes: int, seconds: float) -> None:
    cluster, app = MadeUp(nodes), web.Application()
    app.router.add_get("/", page)
    app.router.add_get("/page/{file}", page_file)
    app.router.add_get("/v1/live", cluster.live)
    app.router.add_get("/v1/jobs/{job}/{what}", _nothing)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with open_browser(Path(folder)) as tab:
            await tab.screen(1280, 900)
            await tab.open(f"http://{host}:{port}/")
            await _watch(tab, cluster, seconds)
    await runner.cleanup()


async def _watch(tab: Tab, cluster: MadeUp, seconds: float) -> None:
    drawn = f"document.querySelectorAll('.node').length === {cluster.count} && performance.now()"
    drawn_ms = await tab.wait(drawn, within_s=120)
    first = tab.received
    await tab.run(LONG_TASKS)
    await asyncio.sleep(2 * NOTICE_S)
    before = tab.received
    await asyncio.sleep(seconds)
    a_minute = (tab.received - before) / seconds * 60
    busy = await tab.run("window.busy")
    costs = sorted(cluster.costs_s)
    print(f"{cluster.count} nodes")
    for name, value in (
        ("first contentful paint", f"{await tab.run(FIRST_PAINT):.0f} ms"),
        ("every node is drawn after", f"{drawn_ms:.0f} ms"),
        ("bytes until then", f"{first:,}"),
        ("bytes a minute of a watcher, from then on", f"{a_minute:,.0f}"),
        ("the document, median of processor time", f"{1e3 * costs[len(costs) // 2]:.1f} ms"),
        ("longest task of the page, updating", f"{max(busy, default=0):.0f} ms"),
        ("errors of the page", str(tab.errors)),
    ):
        print(f"  {name:<44}{value}")


if __name__ == "__main__":
    main()
