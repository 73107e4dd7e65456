"""The page in a browser with thousands of nodes: ``python -m benchmarks.page [--nodes N]``.

The page's files, and the document and patches that sailord makes of its state, are served to a
headless Chromium. The state is made up: all nodes train, at a step a second whose measured times
vary by 2 %, and every 5 s one of them gets a notice. It prints the first paint, the time until
every node is drawn, the bytes until then and in a minute, and sailord's processor time for the
document, and for the list of nodes that `sailorctl nodes` asks for.

``python -m benchmarks.page --preemptions N`` runs a sailord and four emulated nodes that train, and
prints how long after a node's notice the page shows that it leaves, and the plan without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from agents.protocol.codec import plain
from benchmarks.machine import report_stolen_time
from sailord.api.answers.losses import losses_view
from sailord.api.answers.render import nodes_view
from tests.control.cluster import Cluster
from tests.processes import wait_until
from tests.sailord.daemon.running import TOKEN, Place
from tests.sailord.page.browser import CHROMIUM, Tab, open_browser
from tests.sailord.page.made_up import NOTICE_S, MadeUp, serve

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


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--gpus", type=int, default=1, help="of each node")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--preemptions", type=int, default=0, metavar="N")
    options = parser.parse_args()
    if CHROMIUM is None:
        parser.error("needs chromium in the PATH")
    with report_stolen_time():
        if options.preemptions:
            _preempt(options.preemptions)
        else:
            asyncio.run(_measure(options.nodes, options.gpus, options.seconds))


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


async def _measure(nodes: int, gpus: int, seconds: float) -> None:
    cluster = MadeUp(nodes, gpus)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with (
            serve(cluster.document, cluster.schedule, cluster.measured) as url,
            open_browser(Path(folder)) as tab,
        ):
            await tab.screen(1280, 900)
            await tab.open(url)
            await _watch(tab, cluster, seconds)


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
    nodes_s, nodes_bytes = _nodes_answer(cluster)
    print(f"{cluster.count} nodes of {cluster.gpus} GPUs")
    for name, value in (
        ("first contentful paint", f"{await tab.run(FIRST_PAINT):.0f} ms"),
        ("every node is drawn after", f"{drawn_ms:.0f} ms"),
        ("bytes until then", f"{first:,}"),
        ("bytes a minute of a watcher, from then on", f"{a_minute:,.0f}"),
        ("the document, median of processor time", f"{1e3 * costs[len(costs) // 2]:.1f} ms"),
        (
            "/v1/nodes, with each node's loss, the same",
            f"{1e3 * nodes_s:.0f} ms, {nodes_bytes:,} B",
        ),
        ("longest task of the page, updating", f"{max(busy, default=0):.0f} ms"),
        ("errors of the page", str(tab.errors)),
    ):
        print(f"  {name:<44}{value}")


def _nodes_answer(cluster: MadeUp) -> tuple[float, int]:
    """Return the least processor time of an answer of ``/v1/nodes``, and its bytes."""
    costs, text = [], ""
    for _ in range(5):
        state, begun = cluster.state(), time.process_time()
        text = json.dumps(plain(nodes_view(state, losses=losses_view(state))))
        costs.append(time.process_time() - begun)
    return min(costs), len(text)


if __name__ == "__main__":
    main()
