"""The page in a real browser, with made-up clusters that would be too large or rare to run."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.protocol.records import Bill, JobId, JobRecord, NodeId
from sailord.core.model.nodes import Node
from sailord.core.model.phases import Held
from sailord.core.model.state import Progress, State
from sailord.notify.feed import FeedEvent
from tests.sailord.page.accessibility import check_rules
from tests.sailord.page.browser import NEEDS_CHROMIUM, Tab, open_browser
from tests.sailord.page.made_up import BESIDE, PAUSED, STORAGE, MadeUp, SharedMadeUp, serve

pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]
DRAWN = "document.querySelectorAll('.node').length === {}"


def watch(folder: Path, cluster: MadeUp, play: Callable[[Tab], Awaitable[None]]) -> None:
    """Play something in a browser that shows all nodes; then sailord ends."""

    async def go() -> None:
        async with open_browser(folder) as tab:
            await tab.screen(1280, 900)
            told = cluster.schedule, cluster.measured, cluster.events, cluster
            async with serve(cluster.document, *told) as url:
                await tab.open(url)
                await tab.wait(DRAWN.format(cluster.count))
                await play(tab)
            await tab.wait("document.body.dataset.connection === 'lost'")
            await tab.wait("document.getElementById('figures').innerText.includes('as of ')")
            shown = await tab.run("document.getElementById('figures').innerText")
            assert "nothing needs a person" not in shown
            await check_rules(tab)

    asyncio.run(go())


def test_unknown_prices_are_not_shown_as_zero(tmp_path: Path) -> None:
    async def play(tab: Tab) -> None:
        await tab.wait("document.querySelector('#goodput tbody').innerText.includes('training')")
        await tab.wait("document.getElementById('goodput-note').innerText.includes('unknown')")
        money = await tab.run("document.getElementById('money').innerText")
        assert "$" not in money
        assert money.count("\N{EN DASH}") == 5
        assert "a price is unknown" in money
        assert "at unknown prices" in money
        assert "$" not in await tab.run("document.getElementById('goodput').innerText")

    watch(tmp_path, MadeUp(8, price=None), play)


def test_dollars_of_all_nodes_are_the_ledgers_not_the_sum_of_its_causes(tmp_path: Path) -> None:
    """More is booked than was billed after an instance ended early; the ledger leaves that out."""

    class Ahead(MadeUp):
        def document(self, chosen: JobId | None = None) -> dict[str, Any]:
            found = super().document(chosen)
            return {**found, "goodput": {**found["goodput"], "usd": 12.34, "goodput": 0.432}}

    async def play(tab: Tab) -> None:
        await tab.wait("document.getElementById('money').innerText.includes('$12.34')")
        assert "43.2 %" in await tab.run("document.getElementById('figures').innerText")

    watch(tmp_path, Ahead(8), play)


def test_a_node_says_which_of_its_devices_compute_which_layers(tmp_path: Path) -> None:
    known = "GPU 0\N{EN DASH}3: layers 8\N{EN DASH}11, pipeline 0, stage 2, TP 4"

    async def play(tab: Tab) -> None:
        await tab.run("document.querySelector('[data-id=\\'n00002.1\\']').click()")
        text = "document.getElementById('details').innerText"
        await tab.wait(f"{text}.includes('{known}')")
        await tab.wait("document.querySelectorAll('.stages small:not(.measured)').length === 8")
        rows = await tab.run(
            "[...document.querySelectorAll('.stages small:not(.measured)')].map(s => s.innerText)"
        )
        assert all("computes 0." in row and "predicted 0.8 s" in row for row in rows), rows

    watch(tmp_path, MadeUp(8, gpus=4), play)


def test_a_measured_step_is_drawn_below_the_predicted_rows_and_in_numbers(tmp_path: Path) -> None:
    async def play(tab: Tab) -> None:
        await tab.wait("document.querySelectorAll('#timeline g.measured').length === 7")
        counted = (
            "['forward', 'backward', 'update'].map(kind => "
            "document.querySelector('g.measured').querySelectorAll('rect.' + kind).length)"
        )
        assert await tab.run(counted) == [16, 16, 1]
        title = "document.querySelector('g.measured title').textContent"
        assert await tab.run(title) == "measured forward of micro batch 0: 28 ms"
        # Both rows are on one axis: the predicted step ends where a tenth more fits.
        ends = (
            "[...document.querySelectorAll('#timeline rect.update')].map(r => "
            "+r.getAttribute('x') + +r.getAttribute('width'))"
        )
        assert (await tab.run(ends))[:2] == [pytest.approx(1000 / 1.1, 0.01), pytest.approx(1000)]
        note = await tab.run("document.getElementById('timeline-note').innerText")
        assert "step 40 as measured" in note
        assert "not measured: its node is lost" in await tab.run(
            "document.getElementById('timeline').innerText"
        )
        await tab.run("document.querySelector('#timeline-box summary').click()")
        rows = "[...document.querySelectorAll('#timeline-table tbody tr')].map(r => r.innerText)"
        first, *_, last = [row.split("\t") for row in await tab.run(rows)]
        assert first[0].startswith("pipeline 0")
        assert first[2:5:2] == ["0.8 s", "0.9 s"]
        assert last[3:] == ["its node is lost", "\N{EN DASH}"]
        await check_rules(tab)

    watch(tmp_path, MadeUp(8), play)


def test_a_problem_tells_since_when_and_the_page_what_comes_next(tmp_path: Path) -> None:
    class Troubled(MadeUp):
        def state(self) -> State:
            made = super().state()
            assert made.active is not None
            active = replace(made.active, generation=replace(self.generation, persist_every=5000))
            first = made.nodes[self.records[0].id]
            assert first.report is not None
            told = replace(first, report=replace(first.report, trouble="no room"))
            nodes = made.nodes.with_({first.record.id: told})
            return replace(made, nodes=nodes, active=active, led_since=self.begun)

    async def play(tab: Tab) -> None:
        said = "document.querySelector('#troubles li')?.innerText ?? ''"
        await tab.wait(f"({said}) !== ''")
        text = await tab.run(said)
        assert text.startswith("n00000: no room; ")
        assert re.search(r" · since \d\d:\d\d:\d\d or earlier$", text), text
        coming = await tab.run("document.getElementById('next').innerText")
        assert coming.startswith("Next: a checkpoint at step 5000"), coming
        assert re.search(r"; the planner is asked in [\d.]+ \w+: a better plan may exist", coming)
        assert coming.endswith(". Without n00000 it waits: there is no plan for the other nodes.")
        await check_rules(tab)

    watch(tmp_path, Troubled(8, needed=("n00000",)), play)


def test_a_step_that_was_not_measured_leaves_the_predicted_rows_alone(tmp_path: Path) -> None:
    class Unmeasured(MadeUp):
        measured = None

    async def play(tab: Tab) -> None:
        await tab.wait("document.querySelectorAll('#timeline rect.update').length === 8")
        assert await tab.run("document.querySelectorAll('#timeline g.measured').length") == 0
        assert "as measured" not in await tab.run(
            "document.getElementById('timeline-note').innerText"
        )

    watch(tmp_path, Unmeasured(8), play)


def test_the_list_of_checkpoints_is_read_when_it_is_opened(tmp_path: Path) -> None:
    async def play(tab: Tab) -> None:
        note = "document.getElementById('checkpoints-note').innerText"
        assert await tab.run(note) == f"None yet; they will be in {STORAGE}"
        rows = "[...document.querySelectorAll('#checkpoints tbody tr')].map(r => r.innerText)"
        assert await tab.run(rows) == []
        await tab.run("document.querySelector('#checkpoints-box summary').click()")
        await tab.wait(f"{rows}.length === 5")
        shown = [row.split("\t") for row in await tab.run(rows)]
        assert shown[0][2] == "1 MiB"
        assert shown[0][4].startswith("uploading")
        assert shown[1][:3] == ["40", "1", "3 GiB"]
        assert re.match(r"[\d.]+ days ago", shown[1][3])
        assert shown[1][4].startswith("durable; the job goes on from here if")
        assert shown[3][3:] == ["\N{EN DASH}", "durable; pinned: it is not deleted"]
        assert shown[4] == ["10", "1", "", "", "cannot be read: it was cut off"]

    watch(tmp_path, MadeUp(8), play)


def test_page_shows_time_since_the_last_step_and_slow_or_unused_nodes(tmp_path: Path) -> None:
    class Stuck(MadeUp):
        def state(self) -> State:
            now = super().state()
            assert now.active is not None
            progress = Progress(5, now.now - 300)
            spare = replace(now.nodes[self.records[0].id].record, id=NodeId("s.1"), name="spare")
            nodes = now.nodes.with_({spare.id: Node(spare, self.begun, None, now.now)})
            return replace(now, active=replace(now.active, progress=progress), nodes=nodes)

    async def play(tab: Tab) -> None:
        await tab.wait("document.getElementById('figures').innerText.includes('none for 5 min')")
        await tab.wait("document.getElementById('zone-0').innerText.includes('1 node unused')")
        counts = await tab.run("document.getElementById('counts').innerText")
        assert "no node was found slow" in counts

    cluster = Stuck(8)
    cluster.count = 9
    watch(tmp_path, cluster, play)


def test_a_held_job_shows_no_end_and_no_cost_until_then(tmp_path: Path) -> None:
    class Stopped(MadeUp):
        def state(self) -> State:
            now = super().state()
            assert now.active is not None
            closed = replace(self.generation, state="closed")
            held = replace(now.active, phase=Held("it is stuck", now.now), generation=closed)
            return replace(now, active=held)

        def document(self, chosen: JobId | None = None) -> dict[str, Any]:
            found = super().document(chosen)
            return {**found, "job": {**found["job"], "predicted": {"iteration_s": 1.0}}}

    async def play(tab: Tab) -> None:
        for box, name in (("money", "to come"), ("figures", "done in")):
            shown = f"document.getElementById('{box}').innerText"
            await tab.wait(f"{shown}.includes('not known yet')")
            words = (await tab.run(shown)).split("\n")
            assert words[words.index(name) + 1] == "\N{EN DASH}"

    watch(tmp_path, Stopped(8), play)


def test_a_budget_that_ends_before_the_job_is_told_beside_what_is_to_come(tmp_path: Path) -> None:
    class Poor(MadeUp):
        def document(self, chosen: JobId | None = None) -> dict[str, Any]:
            found = super().document(chosen)
            spent = {"usd": 5.0, "usd_per_hour": 3.6, "usd_max": 5.36, "until": time.time()}
            told = {"steps": 4000, "step": 1000, "measured": {"iteration_s": 10.0}, "spent": spent}
            return {**found, "job": {**found["job"], **told}}

    async def play(tab: Tab) -> None:
        await tab.wait("document.getElementById('figures').innerText.includes('budget ends in')")
        figures = await tab.run("document.getElementById('figures').innerText")
        assert "at about step 1,03" in figures, "360 s of 10 s each"
        assert "done in" not in figures
        money = await tab.run("document.getElementById('money').innerText")
        assert "$30.00" in money
        assert "its budget ends before, in 6 min" in money
        led = await tab.run("document.getElementById('leader').innerText")
        assert led.startswith("Leader: head"), "who leads, in one line"

    watch(tmp_path, Poor(8), play)


def test_a_job_held_by_its_budget_draws_no_speed_says_so_on_its_nodes_and_can_be_raised(
    tmp_path: Path,
) -> None:
    class Unpaid(MadeUp):
        def state(self) -> State:
            now = super().state()
            assert now.active is not None
            closed = replace(self.generation, state="closed")
            held = replace(now.active, phase=Held("it is spent", now.now), generation=closed)
            spent = replace(now.job, state="held", bill=Bill(2.0, until=now.now, usd_max=2.0))
            return replace(now, active=held, jobs={JobId("job"): spent})

    async def play(tab: Tab) -> None:
        # The line breaks where nothing came for a minute, and ends where the job was held.
        await tab.wait("document.querySelectorAll('.curve').length === 2")
        drawn = "document.querySelector('#speed .curve').getAttribute('d')"
        assert (await tab.run(drawn)).count("M") == 2
        assert await tab.run("document.querySelector('#speed b').innerText") == "\N{EN DASH}"
        last = f"Math.max(...{drawn}.match(/[\\d.]+(?=,)/g).map(Number))"
        assert await tab.run(last) < 550
        assert set(await tab.run(MOODS)) <= {"calm", "leave"}
        assert "held: layers" in await tab.run("document.getElementById('map').innerText")

        await tab.wait("!!document.querySelector('[data-order=budget]')")
        assert await tab.run("document.querySelector('[data-order=resume]')") is None
        await tab.run("document.querySelector('[data-order=budget]').click()")
        assert await tab.run("document.getElementById('usd-box').hidden") is False
        told = await tab.run("document.getElementById('confirm-text').innerText")
        assert told.endswith("resume it then."), "a larger budget alone ends no hold"
        await tab.run("document.getElementById('usd').value = '4.5'")
        await tab.run("document.getElementById('confirm-yes').click()")
        await tab.wait("!document.getElementById('confirm').open")
        (posted,) = cluster.posted
        assert posted["path"] == "/v1/jobs/job/budget"
        assert posted["max_usd_total"] == 4.5
        await check_rules(tab)

    cluster = Unpaid(8, role="operator")
    begun = cluster.begun - 300
    seconds = (*range(60), *range(120, 180))
    cluster.samples = tuple((begun + s, s, 5.0, 1000.0, 1 + s // 90) for s in seconds)
    watch(tmp_path, cluster, play)


def test_the_page_says_what_was_risked_paid_and_chosen_and_whom_a_job_waits_for(
    tmp_path: Path,
) -> None:
    class Told(SharedMadeUp):
        def state(self) -> State:
            made = super().state()
            queued = JobRecord(JobId("next"), "queued", steps=10)
            return made.with_job(queued)

        def document(self, chosen: JobId | None = None) -> dict[str, Any]:
            found = super().document(chosen)
            if chosen is None:
                found["plan"] = {**found["plan"], "why": ["bottleneck: stage 0", "without zone-1"]}
                found["job"] = {**found["job"], "step": 50, "safe_step": 50}
            else:
                found["jobs"]["job"] = {"state": "running", "step": 10, "steps": 40, "step_s": 1.5}
            return found

    async def play(tab: Tab) -> None:
        figures = "document.getElementById('figures').innerText"
        await tab.wait(f"{figures}.includes('0 steps')")
        assert "if one node is lost; 50 steps if all are" in await tab.run(figures)
        await tab.wait("document.querySelectorAll('#moves li').length === 1")
        assert ", $0.002" in await tab.run("document.getElementById('moves').innerText")
        await tab.run("document.querySelector('#reasons summary').click()")
        reasons = "[...document.querySelectorAll('#reasons li')].map(each => each.innerText)"
        assert await tab.run(reasons) == ["bottleneck: stage 0", "without zone-1"]
        lines = "[...document.querySelectorAll('#events span')].map(each => each.innerText)"
        await tab.wait(f"{lines}.length === 3")
        assert await tab.run(lines) == ["step 9 is durable", "next: done: 3 steps", "n1 is lost"]
        await tab.run("location.hash = '#job=next'")
        why = "document.getElementById('why').innerText"
        await tab.wait(f"{why}.includes('It waits for')")
        assert "job (running, done in 45 s at its speed)" in await tab.run(why)
        await tab.run("location.hash = ''")
        await tab.wait(f"{figures}.includes('nothing needs a person')")

    cluster = Told(8, moves=(MOVE,))
    cluster.count = 9
    told = (
        ("node_lost", "n1 is lost", None),
        *(("checkpoint_committed", f"step {step} is durable", "job") for step in range(7)),
        ("job_finished", "done: 3 steps", "next"),
        ("transition", "done: 3 steps", "next"),
        *(("checkpoint_committed", f"step {step} is durable", "job") for step in range(7, 10)),
    )
    cluster.events = tuple(
        FeedEvent(number, cluster.begun, kind, text, job=job)
        for number, (kind, text, job) in enumerate(told, 1)
    )
    watch(tmp_path, cluster, play)


MOVE = {
    "generation": 2, "at": 0.0, "kind": "loss", "reason": "n1 lost", "steps_lost": 0,
    "downtime_s": 1.0, "predicted_s": 2.0, "total_s": 1.5, "phases": [["plan", 1.0]], "usd": 0.0021,
}  # fmt: skip


def test_accessibility_rules_hold_on_the_map_of_many_nodes(tmp_path: Path) -> None:
    async def play(tab: Tab) -> None:
        await tab.wait("document.querySelectorAll('.compact .node[data-works=yes]').length === 120")
        await check_rules(tab)

    watch(tmp_path, MadeUp(120), play)


SHOWN = "document.getElementById('job').innerText"
JOBS = "[...document.querySelectorAll('#jobs a')]"
MOODS = "[...document.querySelectorAll('.node')].map(n => n.dataset.mood)"


def shared() -> MadeUp:
    """Eight nodes of the first job, and one of the other."""
    cluster = SharedMadeUp(8)
    cluster.count = 9
    return cluster


def test_a_reader_chooses_a_job_by_a_link_that_survives_a_reload(tmp_path: Path) -> None:
    async def play(tab: Tab) -> None:
        assert await tab.run(f"{JOBS}.map(a => a.innerText)") == ["job", BESIDE, PAUSED]
        assert await tab.run(SHOWN) == "job"
        row = await tab.run("document.querySelector('#jobs li:nth-child(2)').innerText")
        assert row == "beside: running, step 7 of 50,000, 1 node"
        label = "document.querySelector('[data-id=\\'own.1\\']').getAttribute('aria-label')"
        assert "beside: trains" in await tab.run(label)
        await check_rules(tab)

        await tab.run(f"{JOBS}[1].focus()")
        enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        await tab.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **enter)
        await tab.call("Input.dispatchKeyEvent", type="keyUp", **enter)
        await tab.wait(f"{SHOWN} === 'beside'")
        await tab.wait("document.getElementById('figures').innerText.includes('of 50,000')")
        assert await tab.run("document.activeElement.getAttribute('aria-current')") == "true"
        assert await tab.run("location.hash") == "#job=beside"
        moods = await tab.run(MOODS)
        assert moods.count("good") == 1
        assert moods.count("other") + moods.count("leave") == 8
        assert "unused" not in await tab.run("document.getElementById('map').innerText")
        await check_rules(tab)
        await tab.run("document.getElementById('skip').click()")
        assert await tab.run("document.activeElement.id") == "main"

        await tab.call("Page.reload")
        await tab.wait(f"{SHOWN} === 'beside' && {JOBS}.length === 4")
        await tab.run(f"{JOBS}[3].click()")
        await tab.wait(f"{SHOWN} === 'job' && {JOBS}.length === 3")
        assert tab.errors == []

    watch(tmp_path, shared(), play)


def test_jobs_that_do_not_run_are_shown_without_a_plan_and_unknown_ones_are_named(
    tmp_path: Path,
) -> None:
    async def play(tab: Tab) -> None:
        await tab.run(f"{JOBS}[2].click()")
        await tab.wait(f"{SHOWN} === '{PAUSED}'")
        await tab.wait("document.getElementById('why').innerText === 'paused: lunch.'")
        assert await tab.run("document.getElementById('phase').innerText") == "paused"
        note = await tab.run("document.getElementById('timeline-note').innerText")
        assert note == "The job does not run."
        assert await tab.run("document.querySelectorAll('[data-works=yes]').length") == 0
        assert "good" not in await tab.run(MOODS)
        assert STORAGE in await tab.run("document.getElementById('checkpoints-note').innerText")
        # As the address that signs in and shows a job does.
        await tab.run("location.hash = '#token=secret&job=nobody'")
        await tab.wait("document.getElementById('why').innerText.startsWith('No job of this name')")
        assert await tab.run(SHOWN) == "nobody"
        assert await tab.run("location.hash") == "#job=nobody"
        assert await tab.run("sessionStorage.getItem('sailor-token')") == "secret"
        await check_rules(tab)
        await tab.run("history.back()")
        await tab.wait(f"{SHOWN} === '{PAUSED}'")
        assert tab.errors == []

    watch(tmp_path, shared(), play)


def test_a_stream_that_is_refused_says_why(tmp_path: Path) -> None:
    """A leader that answers 429 or 503 is there, and says what to wait for."""
    refused = {"problems": [{"place": "requests", "what": "too many at once", "cure": "wait"}]}
    script = (
        "import('/page/stream.js').then(({ follow }) => new Promise((resolve) => {"
        f"  window.fetch = async () => new Response('{json.dumps(refused)}', {{ status: 429 }});"
        "  follow({ path: () => '/v1/live', begin() {}, event() {},"
        "    state: (name, why) => resolve([name, why]) });"
        "}))"
    )

    async def play(tab: Tab) -> None:
        assert await tab.run(script) == ["lost", "sailord refuses: requests: too many at once"]

    watch(tmp_path, MadeUp(8), play)


def test_an_event_of_another_job_names_it(tmp_path: Path) -> None:
    async def play(tab: Tab) -> None:
        lines = "[...document.querySelectorAll('#events span')].map(each => each.innerText)"
        await tab.wait(f"{lines}.length === 3")
        assert await tab.run(lines) == [
            "n1 is lost",
            "step 8 is durable",
            "beside: step 9 is durable",
        ]

    cluster = shared()
    cluster.events = tuple(
        FeedEvent(number, cluster.begun, "note", text, job=job)
        for number, (job, text) in enumerate(
            ((BESIDE, "step 9 is durable"), ("job", "step 8 is durable"), (None, "n1 is lost")), 1
        )
    )
    watch(tmp_path, cluster, play)
