"""The screen in a terminal emulator, in a storm: text files hold what it shows at four sizes."""

from __future__ import annotations

import copy
import io
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyte
import pytest
from rich.console import Console
from rich.live import Live

from sailord.screen.screen_data import ScreenData
from sailord.screen.ui import Ui
from sailord.screen.view import back_max, screen, sparkline, summary

HERE = Path(__file__).parent
FIRST = Ui(can_kill=True)
SIZES = [(60, 20), (80, 24), (120, 40), (200, 60)]
STORM = json.loads((HERE / "storm.json").read_text(encoding="utf-8"))
"""Recorded from `sailorctl up` after a loss and a notice."""


def eight() -> ScreenData:
    """The storm as it was recorded."""
    storm = copy.deepcopy(STORM)  # Some tests change it.
    seen = ScreenData()
    seen.take(storm["status"], storm["nodes"], storm["events"])
    seen.losses = [tuple(pair) for pair in storm["losses"]]
    seen.say("b1 is killed, and its memory is lost", STORM["status"]["at"])
    return seen


def five_hundred() -> ScreenData:
    """A larger cluster in twelve zones: some nodes leave, some are lost, one is slow."""
    like, nodes = STORM["nodes"][0], []
    for number in range(500):
        zone = number % 12
        state = {7: "lost", 8: "draining", 9: "slow"}.get(number % 97, "ready")
        nodes.append(
            like
            | {"name": f"z{zone}-n{number}", "id": f"z{zone}-n{number}", "zone": f"region-{zone}"}
            | {"state": state, "gpus": 8, "gpu": "A100-40" if zone < 6 else "L4"}
        )
    members = [n for n in nodes if n["state"] == "ready" and int(n["id"][-1]) != 3]
    status = large(nodes, members)
    status["job"]["plan"] = plan_on(members)
    seen = ScreenData()
    moves = [
        (
            "reconfigured",
            None,
            f"z{n % 12}-n{n} lost → moved to {450 - n} nodes, 0 steps lost, 2.1 s",
        )
        for n in range(40)
    ]
    seen.take(status, nodes, [*STORM["events"], *events_of(moves, STORM["events"][-1])])
    seen.losses = [(step, 3.0 + 100 / (step + 20)) for step in range(0, 12_345, 40)]
    return seen


def large(nodes: list[Any], members: list[Any]) -> Any:
    """The status of a cluster of these nodes."""
    status = json.loads(json.dumps(STORM["status"]))
    status["nodes"] = dict(Counter(node["state"] for node in nodes))
    job = status["job"]
    job |= {"members": [node["name"] for node in members], "steps": 40_000, "step": 12_345}
    job |= {"safe_step": 12_344, "durable_step": 12_300}
    job["spent"] |= {"usd_per_hour": 9_440.0, "usd": 16_231.5, "usd_max": 60_000.0}
    job["measured"]["tokens_per_s"] = 1_204_000.0
    return status


def plan_on(members: list[Any]) -> Any:
    """A plan with a pipeline for every two nodes of a zone."""
    pipelines = []
    for zone in dict.fromkeys(node["zone"] for node in members):
        here = [node for node in members if node["zone"] == zone]
        for pair in zip(here[::2], here[1::2], strict=False):
            stages = [
                {name: node[name] for name in ("gpu", "machine", "zone")}
                | {"layers": [4 * n, 4 * n + 4], "tp": 8, "node": node["id"]}
                for n, node in enumerate(pair)
            ]
            pipelines.append({"micro_batches": 4, "stages": stages})
    return {"micro_batch_size": 1, "pipelines": pipelines}


def events_of(told: list[tuple[str, str | None, str]], last: Any) -> list[Any]:
    """Events that follow the last, one each second: their kind, node and text."""
    return [
        {"id": last["id"] + n, "at": last["at"] + n, "kind": kind, "node": node, "text": text}
        | {"job": "tale" if node is None else None, "is_detail": False}
        for n, (kind, node, text) in enumerate(told, start=1)
    ]


def starting() -> ScreenData:
    """Five hundred nodes of which a whole zone was lost, and another one leaves."""
    seen = five_hundred()
    nodes = [dict(node) for node in seen.nodes]
    for node in nodes:
        if node["zone"] == "region-7":
            node |= {"state": "lost"}
        elif node["zone"] == "region-3":
            node |= {"state": "draining", "leaves_at": STORM["status"]["at"] + 24.5}
    lost = [node["name"] for node in nodes if node["zone"] == "region-7"]
    members = [node for node in nodes if node["state"] == "ready"]
    status = large(nodes, members)
    job = status["job"]
    reason = "; ".join(f"{name} is lost: its lease expired" for name in lost)
    job["phase"] |= {"name": "starting", "since": status["at"] - 1.5, "reason": reason}
    job["generation"] |= {"number": 41, "reason": reason}
    job["measured"] = dict.fromkeys(job["measured"])
    job |= {"plan": plan_on(members), "safe_step": None}
    now = ScreenData()
    told = [("node_lost", name, f"{name} is lost: its lease expired") for name in lost]
    now.take(status, nodes, [*seen.events, *events_of(told, seen.events[-1])])
    now.losses = seen.losses
    return now


def held() -> ScreenData:
    """The same when no start succeeded, with a store that does not answer and a paused job."""
    seen = starting()
    status: Any = seen.status
    why = "z2-n14 failed: rank 5: RuntimeError: CUDA error: an illegal memory access was found"
    status["job"]["phase"] |= {"name": "held", "reason": f"3 attempts failed; the last: {why}"}
    status["job"] |= {
        "storage_trouble": "gs://bucket/tale: 403 Forbidden: no storage.objects.create"
    }
    status["store"] |= {"answers": False, "away_since": status["at"] - 42.0}
    status["paused"] = [{"id": "other", "state": "paused", "reason": "lunch (by alice)"}]
    status["job"]["spent"] |= {"usd_per_hour": 0.0}
    told = [("job_held", None, f"3 attempts failed; the last: {why}")]
    seen.take(status, seen.nodes, events_of(told, seen.events[-1]))
    return seen


def shown(seen: ScreenData, width: int, height: int, ui: Ui = FIRST, **how: Any) -> list[str]:
    """What a terminal of this size shows, after it was drawn twice."""
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=width, height=height, color_system="256",
        highlight=False, legacy_windows=False,
    )  # fmt: skip
    emulator = pyte.Screen(width, height)
    stream = pyte.Stream(emulator)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for _ in range(2):
            live.update(screen(seen, ui, width, height, **how), refresh=True)
        stream.feed(out.getvalue().replace("\n", "\r\n"))
    return [line.rstrip() for line in emulator.display]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("of", [eight, five_hundred, starting, held])
def test_screen_equals_its_golden_file(of, size):
    file = HERE / "screens" / f"{of.__name__}-{size[0]}x{size[1]}.txt"
    text = "\n".join(shown(of(), *size)) + "\n"
    if os.environ.get("SAILOR_RETELL"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_every_golden_screen_belongs_to_a_case():
    cases = [
        f"{of}-{w}x{h}" for of in ("eight", "five_hundred", "starting", "held") for w, h in SIZES
    ]
    assert {file.stem for file in (HERE / "screens").glob("*.txt")} == set(cases)


@pytest.mark.parametrize("size", [*SIZES, (61, 21), (133, 27)])
@pytest.mark.parametrize("of", [eight, five_hundred])
def test_headline_newest_event_and_keys_are_on_every_screen(of, size):
    lines = shown(of(), *size)
    assert lines[0].startswith("tale  running")
    assert lines[1].startswith("step ")
    assert "ETA" in lines[1] or "budget ends in" in lines[1]
    assert "loss" in lines[2]
    assert ("$8.80/h" if of is eight else "$9,440.00/h") in lines[2]
    assert "a node's loss costs" in lines[3]
    assert "durable" in lines[3]
    assert "preempt" in lines[-1]
    newest = "b1 is killed" if of is eight else "z3-n39 lost → moved to 411 nodes"
    assert any(newest in line for line in lines)


def test_a_job_that_starts_after_many_losses_says_how_many():
    lines = shown(starting(), 120, 40)
    assert lines[0].startswith("tale  starting: z7-n7, z7-n19, z7-n31, z7-n43 and 38 more lost")
    (told,) = [line for line in lines if line.endswith("are lost")]
    assert "z7-n7, z7-n19, z7-n31, z7-n43 and 38 more" in told


def test_no_node_computes_while_the_job_is_held():
    assert any("● computing" in line for line in shown(held(), 120, 40)), "the legend"
    assert not any("●" in line for line in shown(held(), 120, 40) if "region" in line)


def test_every_node_with_trouble_is_named_among_five_hundred():
    text = "\n".join(shown(five_hundred(), 200, 60))
    for node in five_hundred().nodes:
        assert (node["name"] in text) or node["state"] == "ready"


def test_events_scroll_back_to_the_first_and_not_further():
    seen = five_hundred()
    first = [line for line in shown(seen, 80, 24, Ui(back=10_000)) if "lost →" in line]
    assert "b1 lost → moved to" in first[0]
    most = back_max(seen, 80, 24)
    assert f"events  {most} newer ones below" in shown(seen, 80, 24, Ui(back=10_000))
    assert back_max(eight(), 80, 24) == 0, "all are in sight"
    assert back_max(seen, 30, 5) == 0
    title = next(line for line in shown(seen, 80, 24, Ui(back=3)) if line.startswith("events"))
    assert title == "events  3 newer ones below"


def test_a_prompt_shows_the_nodes_that_match():
    last = shown(eight(), 80, 24, Ui(can_kill=True, verb="kill", typed="a"))[-1]
    assert last.startswith("kill which node? a_")
    assert last.endswith("a1 a2 a3")


@pytest.mark.parametrize(("size", "count"), [((80, 24), 1), ((120, 40), 3)])
def test_the_first_hint_is_shown_if_not_all_fit(size, count):
    seen = eight()
    seen.hints = (
        "in a browser: http://127.0.0.1:7077/",
        *["another hint"] * (2 if count == 3 else 20),
    )
    lines = shown(seen, *size)
    assert sum("in a browser:" in line for line in lines) == 1
    assert sum("another hint" in line for line in lines) == count - 1


def test_what_a_job_prints_has_no_effect_on_the_terminal():
    seen = held()
    seen.status["job"]["phase"]["reason"] = "it failed: \x1b]52;c;cm0=\x07\x1b[2Jdone"
    lines = shown(seen, 120, 40)
    assert any("it failed: ?]52;c;cm0=?[2Jdone" in line for line in lines), lines


def test_terminals_without_utf8_get_ascii():
    assert "\n".join(shown(eight(), 80, 24, is_ascii=True)).isascii()


def test_held_and_paused_jobs_name_the_command_that_resumes_them():
    seen = eight()
    phase = {"name": "held", "since": None, "deadline": None, "reason": "3 attempts failed"}
    job = STORM["status"]["job"] | {"phase": phase}
    paused = [{"id": "other", "state": "paused", "reason": "pause was ordered"}]
    seen.take(STORM["status"] | {"job": job, "paused": paused}, seen.nodes, [])
    text = "\n".join(shown(seen, 80, 24))
    assert "3 attempts failed" in text
    assert "sailorctl resume tale;" in text
    assert "other is paused: pause was ordered" in text


def test_screen_says_why_there_is_no_answer_and_keeps_the_last_one():
    seen = eight()
    seen.outage = "unix:///x did not answer: Connection refused"
    lines = shown(seen, 80, 24)
    assert lines[0].startswith("tale")
    assert "no answer: unix:///x did not answer" in lines[1]


@pytest.mark.usefixtures("in_berlin")
def test_clock_times_are_local_and_the_title_names_their_zone():
    lines = shown(eight(), 80, 24)
    assert lines[0].endswith("09:44:46 CET")
    assert "Wed 09:47" in lines[1]
    assert "09:44:46 b1 is killed, and its memory is lost" in lines


def test_an_end_in_thousands_of_years_is_shown_without_a_date():
    seen = eight()
    seen.take(STORM["status"] | {"job": STORM["status"]["job"] | {"steps": 2**53}}, seen.nodes, [])
    assert "ETA" in shown(seen, 120, 24)[1]


def test_sparkline_falls_with_its_values():
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline([4, 4, 2, 2], 2) == "█▁"
    assert sparkline([1.0], 8) == ""
    assert sparkline([1.0, 1.0], 8) == "▁▁"


def test_summary_sums_moves_and_leaves_the_start_out():
    moves = [
        {"kind": "start", "steps_lost": 0, "downtime_s": 0.0},
        {"kind": "loss", "steps_lost": 1, "downtime_s": 1.5},
        {"kind": "notice", "steps_lost": 0, "downtime_s": 0.5},
    ]
    text = summary(STORM["status"]["job"], moves, 60.0)
    assert "tale: 33 steps in 60.0 s; 2 moves, 1 step lost, 2.0 s of downtime; $0.1" in text
    since = summary(STORM["status"]["job"], moves, 60.0, before=(30, 0.1))
    assert "tale: 3 steps in 60.0 s; 2 moves" in since
    assert "; $0.01;" in since


def test_no_color_switches_colours_off(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24, highlight=False)
    console.print(screen(eight(), FIRST, 80, 24))
    codes = re.findall(r"\x1b\[([0-9;]*)m", out.getvalue())
    used = {code for each in codes for code in each.split(";")}
    assert used <= {"", "0", "1", "2", "7"}, "bold, dim and reverse at most"


def test_plan_line_names_all_chunks_of_a_stage_group():
    seen = eight()
    status: Any = seen.status
    like = status["job"]["plan"]["pipelines"][0]["stages"][0]
    spans = ((0, 1), (1, 3), (3, 4), (4, 6))
    stages = [like | {"layers": span, "zone": "z", "gpu": "T4", "tp": 1} for span in spans]
    status["job"]["plan"] = {"pipelines": [{"stages": stages}], "virtual_stages": 2}
    assert any("plan  1 x z T4 0+3|1-2+4-5" in line for line in shown(seen, 120, 40))
