"""The page in the browser with thousands of nodes: ``python -m benchmarks.page [--nodes N]``.

A real sailord serves agents as in ``benchmarks.control``, and a headless Chromium shows its page.
Printed are the first paint, the time until every node is drawn, the bytes of the first minute and
of a later one, and what the watcher costs sailord.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.control import JOB, TOKEN, Head, begin_agents, wait_until
from tests.sailord.page.browser import Tab, open_browser

PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
LONG_TASKS = (
    "window.busy = []; new PerformanceObserver(list => window.busy.push("
    "...list.getEntries().map(e => e.duration))).observe({type: 'longtask', buffered: true}); 1"
)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        url = f"unix://{folder}/state/store.sock"
        head = Head(folder, url)
        stack.callback(head.process.wait)
        stack.callback(head.process.terminate)
        wait_until(lambda: head.ask("/readyz").get("leads"), within_s=60)
        agents = begin_agents(url, options.nodes, stack)
        wait_until(
            lambda: head.ask("/v1/status")["nodes"].get("ready") == options.nodes, within_s=600
        )
        head.ask("/v1/jobs", {"job": JOB, "id": "j"})
        wait_until(
            lambda: head.ask("/v1/status")["job"]["phase"]["name"] == "running", within_s=300
        )
        asyncio.run(_watch(head, folder, options.nodes, options.seconds))
        del agents  # They end with their pipes.


async def _watch(head: Head, folder: Path, nodes: int, seconds: float) -> None:
    before = head.busy_s()
    await asyncio.sleep(seconds)
    alone = (head.busy_s() - before) / seconds
    async with open_browser(folder) as tab:
        await tab.screen(1280, 900)
        await tab.open(f"http://127.0.0.1:{head.port}/#token={TOKEN}")
        await tab.wait(f"document.querySelectorAll('.node').length === {nodes}", within_s=120)
        drawn_ms = await tab.run("performance.now()")
        first = tab.received
        await tab.run(LONG_TASKS)
        await asyncio.sleep(5)
        figures = await _minute(tab, head, seconds)
        print(f"nodes                               {nodes}")
        print(f"first contentful paint              {await tab.run(PAINT):.0f} ms")
        print(f"every node drawn after              {drawn_ms:.0f} ms")
        print(f"bytes until then                    {first:,}")
        print(f"bytes a minute of a watcher         {figures[0]:,.0f}")
        print(f"sailord's share of a core           {alone:.1%}, with a watcher {figures[1]:.1%}")
        busy = await tab.run("window.busy")
        print(f"tasks of the page over 50 ms        {len(busy)}, longest {max(busy, default=0)} ms")
        print(f"errors of the page                  {tab.errors}")


async def _minute(tab: Tab, head: Head, seconds: float) -> tuple[float, float]:
    """Return bytes a minute, and sailord's share of a core meanwhile."""
    received, busy = tab.received, head.busy_s()
    await asyncio.sleep(seconds)
    return (tab.received - received) / seconds * 60, (head.busy_s() - busy) / seconds


if __name__ == "__main__":
    main()
