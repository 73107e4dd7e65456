"""The page in a real browser: what it shows, how soon, to whom, and whether it is accessible."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from sailord.tokens import create_token
from tests.control.cluster import Cluster
from tests.processes import wait_until
from tests.sailord.daemon.running import TOKEN
from tests.sailord.page.accessibility import check_rules
from tests.sailord.page.browser import NEEDS_CHROMIUM, Tab

pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]
Browse = Callable[..., None]
NODES = "document.querySelectorAll('.node').length === 4"
CHARTS = "document.querySelectorAll('.curve').length === 2"
SCHEDULE = "document.querySelectorAll('#timeline rect.forward').length > 3"
GOODPUT = "document.querySelector('#goodput tbody')?.innerText.includes('training')"


def node(name: str) -> str:
    return f"[...document.querySelectorAll('.node')].find(b => b.innerText.includes('{name}'))"


async def press(tab: Tab, element: str) -> None:
    await tab.run(f"{element}.click()")


async def whole(tab: Tab) -> None:
    """Wait until everything is drawn."""
    for shown in (NODES, CHARTS, SCHEDULE, GOODPUT):
        await tab.wait(shown)


def test_the_page_shows_job_nodes_layers_charts_schedule_goodput_and_events(
    browse: Browse,
) -> None:
    async def play(tab: Tab) -> None:
        await whole(tab)
        text = await tab.run("document.body.innerText")
        for said in ("running", "tokens/s", "Generation", "layers", "us-central1",
                     "reconfiguring: plan", "this job so far", "started in"):  # fmt: skip
            assert said in text, said
        label = f"{node('a1')}.getAttribute('aria-label')"
        await tab.wait(f"{label}.includes('trains') && {label}.includes('layers')")
        names = "[...document.querySelectorAll('.stages small')].map(s => s.innerText)"
        rows = await tab.run(names)
        assert rows
        assert all(re.match(r"\s*on [ab][12]\b", row) for row in rows), rows
        assert await tab.run("document.querySelector('#events').innerText.includes('started on')")
        assert "running" in await tab.run("document.title")
        assert tab.errors == []

    browse(play)


def test_days_and_jobs_of_the_goodput_are_those_of_the_api(
    browse: Browse, cluster: Cluster
) -> None:
    rows = (
        "[...document.querySelectorAll('#shares tbody tr')].map(r => "
        "[r.cells[0].innerText.trim(), parseFloat(r.cells[2].title)])"
    )

    async def ask() -> dict[str, float]:
        found = (await asyncio.to_thread(cluster.head.ask, "GET", "/v1/goodput"))[1]
        return {each["name"] or "no job": each["gpu_s"] for each in found["days"] + found["jobs"]}

    async def play(tab: Tab) -> None:
        await whole(tab)
        before = await ask()
        await tab.wait(f"{rows}[0][1] >= {min(before.values()):.0f}")
        shown, after = dict(await tab.run(rows)), await ask()
        assert shown.keys() == after.keys()
        assert all(seconds <= after[name] + 1 for name, seconds in shown.items())

    browse(play)


def test_goodput_and_its_dollars_are_those_of_the_api(browse: Browse, cluster: Cluster) -> None:
    rows = (
        "Object.fromEntries([...document.querySelectorAll('#goodput tbody tr')].map(r => "
        "[r.cells[0].innerText.split('\\n')[0].trim(), [parseFloat(r.cells[2].title), "
        "parseFloat(r.cells[3].innerText.slice(1))]]))"
    )
    paid = (
        "parseFloat([...document.querySelectorAll('#money div')].find(d => "
        "d.firstChild.innerText === 'all nodes').lastChild.firstChild.data.slice(1))"
    )

    async def ask() -> Any:
        return (await asyncio.to_thread(cluster.head.ask, "GET", "/v1/goodput"))[1]

    async def play(tab: Tab) -> None:
        await whole(tab)
        # Time goes on: the page shows no less than before it was asked, and no more than after.
        before = await ask()
        assert before["usd"] > 0.01
        known = {each["label"]: each for each in before["causes"] if each["gpu_s"] > 0}
        known.pop("step under way", None)  # It is booked to other causes when it ends.
        least = {label: each["gpu_s"] - 0.1 for label, each in known.items()}
        await tab.wait(
            f"(shown => Object.entries({json.dumps(least)}).every(([label, s]) => "
            f"shown[label]?.[0] >= s))({rows}) && {paid} >= {before['usd'] - 0.01}"
        )
        shown, usd = await tab.run(rows), await tab.run(paid)
        after = await ask()
        most = {each["label"]: each for each in after["causes"]}
        for label, (gpu_s, cost) in shown.items():
            if label != "step under way":
                assert gpu_s <= most[label]["gpu_s"] + 0.1, label
                assert cost <= most[label]["usd"] + 0.01, label
        assert usd <= after["usd"] + 0.01

    browse(play)


def test_a_preemption_and_the_plan_without_the_node_show_at_once(
    browse: Browse, cluster: Cluster
) -> None:
    async def play(tab: Tab) -> None:
        await whole(tab)
        # What the page does is timed in the page, so that this machine's load counts least.
        await tab.run(
            "window.changed = new Promise(done => { const box = document.getElementById('map');"
            "new MutationObserver(() => { if (box.querySelector('[data-mood=leave]')) done(1); })"
            ".observe(box, {subtree: true, attributes: true, childList: true}); }); 1"
        )
        code, _ = await asyncio.to_thread(
            cluster.head.ask, "POST", "/v1/nodes/b2/preempt", {"reason": "maintenance"}
        )
        assert code == 202
        assert await tab.run("window.changed") == 1
        await tab.wait(f"{node('b2')}.dataset.works === 'no'")
        await tab.wait("document.querySelectorAll('#moves li').length > 1")
        assert "b2 is draining" in await tab.run("document.querySelector('#events').innerText")
        said = "document.getElementById('last-order').innerText"
        await tab.wait(f"{said}.includes('preempting b2 was ordered: maintenance')")
        assert tab.errors == []

    try:
        browse(play)
    finally:
        cluster.head.ask("POST", "/v1/nodes/b2/withdraw", {})
        wait_until(lambda: cluster.head.status()["nodes"].get("ready") == 4)
        wait_until(cluster.is_running)


def test_an_operator_gives_orders_after_a_confirmation(browse: Browse, cluster: Cluster) -> None:
    async def play(tab: Tab) -> None:
        await whole(tab)
        await press(tab, node("a1"))
        await tab.wait("!document.getElementById('details').hidden")
        facts = "document.getElementById('details').innerText"
        await tab.wait(f"{facts}.includes('state is kept on')")
        assert "if it died now" in await tab.run(facts)
        await press(tab, "document.querySelector('#node-orders [data-order=cordon]')")
        await tab.wait("document.getElementById('confirm').open")
        assert await tab.run("document.activeElement.closest('dialog') !== null")
        await tab.run("document.getElementById('reason').value = 'a bolt'")
        await press(tab, "document.getElementById('confirm-yes')")
        await tab.wait("document.querySelector('#node-orders [data-order=uncordon]') !== null")
        nodes = (await asyncio.to_thread(cluster.head.ask, "GET", "/v1/nodes"))[1]["nodes"]
        assert {each["name"] for each in nodes if each["cordoned"]} == {"a1"}
        assert tab.errors == []

    try:
        browse(play)
    finally:
        cluster.head.ask("POST", "/v1/nodes/a1/uncordon", {})


def test_a_viewer_sees_everything_and_cannot_give_orders(browse: Browse, cluster: Cluster) -> None:
    token = create_token(cluster.folder / "tokens", f"eve-{id(browse)}", "viewer", None)

    async def play(tab: Tab) -> None:
        await whole(tab)
        await press(tab, node("a1"))
        assert await tab.run("document.querySelectorAll('[data-order]').length") == 0
        assert "viewer" in await tab.run("document.getElementById('person').innerText")

    browse(play, token=token)


def test_without_a_token_the_page_asks_for_one(browse: Browse, cluster: Cluster) -> None:
    async def play(tab: Tab) -> None:
        await tab.run("sessionStorage.clear()")
        await tab.open(f"http://127.0.0.1:{cluster.head.port}/")
        await tab.wait("document.getElementById('sign-in')?.open")
        await tab.run(f"document.getElementById('token').value = '{TOKEN}'")
        await press(tab, "document.querySelector('#sign-in button')")
        await tab.wait(NODES)

    browse(play)


def test_a_lost_connection_is_shown_and_reopened_with_the_same_curve(
    browse: Browse, cluster: Cluster
) -> None:
    times = "[...document.querySelectorAll('#loss .times span')].map(s => s.innerText)"
    asked = (
        "performance.getEntriesByType('resource').filter(e => e.name.endsWith('/timeline')).length"
    )

    async def play(tab: Tab) -> None:
        await whole(tab)
        schedules = await tab.run(asked)
        await asyncio.to_thread(cluster.head.stop_all)
        await tab.wait("document.body.dataset.connection === 'lost'")
        assert "Connection lost" in await tab.run("document.getElementById('banner').innerText")
        first, last = await tab.run(times)
        cluster.head.processes.clear()
        cluster.head.start()
        await tab.wait("document.body.dataset.connection === 'live' && " + NODES)
        assert await tab.run("document.getElementById('banner').hidden")
        await tab.wait(f"(t => t.length && t[1] !== {last!r})({times})")
        assert (await tab.run(times))[0] == first
        # The new leader sends no measured times beside a schedule that it was not asked for.
        await tab.wait(f"{asked} > {schedules}")

    browse(play)
    wait_until(cluster.is_running)


def test_arrow_keys_walk_through_nodes_and_escape_closes_the_details(browse: Browse) -> None:
    async def key(tab: Tab, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await tab.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    async def play(tab: Tab) -> None:
        await whole(tab)
        await tab.run("document.querySelector('.node').focus()")
        await key(tab, "ArrowRight")
        second = await tab.run("document.activeElement.innerText")
        assert second == await tab.run("document.querySelectorAll('.node')[1].innerText")
        await press(tab, "document.activeElement")
        await key(tab, "Escape")
        assert await tab.run("document.getElementById('details').hidden")
        assert await tab.run("document.activeElement.innerText") == second

    browse(play)


def test_accessibility_rules_hold_on_every_screen_and_it_never_scrolls_sideways(
    browse: Browse,
) -> None:
    async def play(tab: Tab) -> None:
        await whole(tab)
        await press(tab, node("a1"))
        await tab.wait("!document.getElementById('details').hidden")
        await check_rules(tab)

    browse(play)


def test_accessibility_rules_hold_in_the_dialogs(browse: Browse, cluster: Cluster) -> None:
    async def play(tab: Tab) -> None:
        await whole(tab)
        await press(tab, "document.querySelector('#job-orders [data-order=pause]')")
        await tab.wait("document.getElementById('confirm').open")
        await check_rules(tab)
        await tab.run("sessionStorage.clear()")
        await tab.open(f"http://127.0.0.1:{cluster.head.port}/")
        await tab.wait("document.getElementById('sign-in')?.open")
        await check_rules(tab)

    browse(play)
