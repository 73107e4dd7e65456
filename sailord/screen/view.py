"""The screen as a pure function of the last answers and its size: whole lines, none too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from textwrap import wrap
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from sailord.screen.screen_data import ScreenData
from sailord.screen.ui import Ui, matches
from sailord.screen.zone_map import zone_map
from sailord.text.causes import short_cause
from sailord.text.cluster_text import (
    cure_of_hold,
    headline_of,
    number,
    share_of_prediction,
)
from sailord.text.end_text import eta_s, paid_s, usd_to_come
from sailord.text.event_lines import EventLine, fold
from sailord.text.plan_text import StageGroup, pipeline_kinds
from sailord.text.printable import printable
from sailord.text.units import YEAR_S, clock, counted, dollars, duration

WIDTH_MIN, HEIGHT_MIN = 40, 10
BARS = "▁▂▃▄▅▆▇█"
SPARK_MAX = 24
TROUBLE_LINES, TROUBLES_MAX = 3, 5
"""Most lines of one trouble, and of all together."""
BESIDE_MAX = 4
"""Most lines of jobs beside the one that is shown."""
EVENTS_MIN = 4
"""Least lines for events, however many zones there are."""
COLOUR_OF_PHASE = {
    **{"running": "bold green", "held": "bold red", "waiting": "bold yellow"},
    **dict.fromkeys(("planning", "opening", "starting", "stopping", "closing"), "bold cyan"),
}
COLOUR_OF_EVENT = {
    **{"reconfigured": "cyan", "node_lost": "red", "node_preempted": "yellow"},
    **{"checkpoint_committed": "dim", "job_held": "bold red", "job_finished": "bold green"},
}
ASCII = str.maketrans("●○▽✗━─→·…↑↓" + BARS, "*ovx#->-.^v" + "_.-:=+*#")
"""For terminals without UTF-8."""


def screen(
    seen: ScreenData, ui: Ui, width: int, height: int, *, is_ascii: bool = False
) -> RenderableType:
    """Return the screen: headline, map and plan, the last events, and the keys at the bottom."""
    if width < WIDTH_MIN or height < HEIGHT_MIN:
        lines = [Text(f"{width} x {height} is too small; make the terminal larger")]
    else:
        lines = _lines(seen, ui, width, height)
    for line in lines:
        line.plain = printable(line.plain, keep="")
        if is_ascii:
            line.plain = line.plain.translate(ASCII)
        line.truncate(width, overflow="ellipsis" if not is_ascii else "crop")
        line.no_wrap = True
    return Group(*lines[:height])


def back_max(seen: ScreenData, width: int, height: int) -> int:
    """Return by how many events one can scroll back, until the first is in sight."""
    if width < WIDTH_MIN or height < HEIGHT_MIN:
        return 0
    _, events, shown = _layout(seen, width, height)
    return max(len(events) - shown, 0)


def _layout(seen: ScreenData, width: int, height: int) -> tuple[list[Text], list[Text], int]:
    """Return what stands above the events, all events, and how many of them there is room for."""
    head = [*headline(seen, width), Text()]
    room = height - len(head) - 1  # The keys have the last line.
    events = [_event_line(line, seen) for line in fold(seen.events)]
    for_events = min(max(EVENTS_MIN, room // 3), max(len(events), 1)) + 1
    above = [*head, *_middle(seen, width, room - for_events)]
    return above, events, height - len(above) - 2


def _lines(seen: ScreenData, ui: Ui, width: int, height: int) -> list[Text]:
    above, events, shown = _layout(seen, width, height)
    back = min(ui.back, max(len(events) - shown, 0))
    end = len(events) - back
    news = events[max(end - shown, 0) : end]
    title = Text().append("events", "bold")
    title.append(f"  {counted(back, 'newer one')} below" if back else "", "dim")
    filled = [*above, title, *news]
    return [*filled, *[Text()] * (height - len(filled) - 1), _keys(ui, seen, width)]


def headline(seen: ScreenData, width: int) -> list[Text]:
    """Return the lines that are always shown: the job, its progress, speed, price and safety."""
    status, job = seen.status, seen.job
    if status is None:
        return [Text(seen.outage or "waiting for sailord", "yellow")]
    lines = [_title(status, job, width)]
    if seen.outage:
        lines.append(Text(f"no answer: {seen.outage}", "bold red"))
    if job is not None:
        lines += [
            _progress(job, status["at"], width),
            _speed(seen, job, width),
            _safety(job),
        ]
    lines += _beside_lines(seen, width)
    parts = [part for said in _troubles(status, job) for part in wrap(said, width)[:TROUBLE_LINES]]
    return [*lines, *(Text(part, "red") for part in parts[:TROUBLES_MAX])]


def _title(status: Mapping[str, Any], job: Mapping[str, Any] | None, width: int) -> Text:
    line = Text()
    if job is None:
        line.append("no job", "bold yellow")
        line.append(f"  {counted(status['queued'], 'job')} queued" if status["queued"] else "")
    else:
        phase = job["phase"]
        line.append(job["id"], "bold").append("  ")
        line.append(phase["name"], COLOUR_OF_PHASE.get(phase["name"], "bold"))
        since, is_moving = phase["since"], phase["name"] not in ("running", "held", "waiting")
        if is_moving and phase["reason"]:
            line.append(f": {short_cause(phase['reason'])}")
        elif since is not None:
            line.append(f" for {duration(status['at'] - since)}")
        generation = job["generation"]
        if generation is not None and width >= 80:
            line.append(f" · generation {generation['number']}", "dim")
    nodes = sum(status["nodes"].values()) - status["nodes"].get("lost", 0)
    zone = datetime.fromtimestamp(status["at"]).astimezone().strftime("%Z")
    rights = [status["cluster"], counted(nodes, "node"), f"{clock(status['at'])} {zone}"]
    while rights and line.cell_len + len(" · ".join(rights)) + 2 > width:
        rights.pop(0)
    right = " · ".join(rights)
    return line.append(right.rjust(max(width - line.cell_len, 0)), "dim")


def _beside_lines(seen: ScreenData, width: int) -> list[Text]:
    """Return a line for each job that shares the cluster with the one that is shown."""
    shown = None if seen.job is None else seen.job["id"]
    others = [each for each in seen.running if each["id"] != shown]
    names = max((len(each["id"]) for each in others[:BESIDE_MAX]), default=0)
    lines = []
    for each in others[:BESIDE_MAX]:
        line = Text().append(each["id"][: width // 2].ljust(min(names, width // 2)), "bold")
        phase, _, rest = headline_of(each).partition(",")
        line.append("  ").append(phase, COLOUR_OF_PHASE.get(phase, "bold")).append(
            f",{rest}", "dim"
        )
        lines.append(line)
    more = len(others) - BESIDE_MAX
    return [*lines, *([Text(f"{counted(more, 'more job')}: sailorctl jobs", "dim")] * (more > 0))]


def _progress(job: Mapping[str, Any], at: float, width: int) -> Text:
    line, steps = Text(), job["steps"]
    if steps is None:
        return line.append(f"step {job['step']:,}", "bold").append(", without an end", "dim")
    share = min(job["step"] / steps, 1.0) if steps else 1.0
    line.append(f"step {job['step']:,}", "bold").append(f" of {steps:,} ")
    left_s = eta_s(job)
    after = f" {share:.0%}"
    if left_s is not None:
        after += f"  ETA {duration(left_s)}"
        if width >= 80 and left_s < YEAR_S:
            after += f", {datetime.fromtimestamp(at + left_s).strftime('%a %H:%M')}"
        usd, budget_s = usd_to_come(job), paid_s(job)
        after += f", {dollars(usd)} more" if usd else ""
        after = after if budget_s is None else f" {share:.0%}  budget ends in {duration(budget_s)}"
    cells = min(max(width - line.cell_len - len(after), 6), 40)
    full = int(share * cells)
    line.append("━" * full, "green").append("─" * (cells - full), "dim")
    return line.append(after)


def _speed(seen: ScreenData, job: Mapping[str, Any], width: int) -> Text:
    measured, spent, line = job["measured"], job["spent"], Text()
    rate, most = spent["usd_per_hour"], spent["usd_max"]
    money = Text("  ").append("no price" if rate is None else f"${rate:,.2f}/h", "bold")
    money.append(f" ${spent['usd']:,.2f}").append("" if most is None else f" of ${most:,.2f}")
    speed = Text(f"  {number(measured['tokens_per_s'])}", "bold").append(f" {job['unit']}/s", "")
    share = share_of_prediction(measured, job["predicted"])
    if share is not None and width >= 80:
        style = "dim" if 0.8 <= share <= 1.25 else "yellow"
        speed.append(f" ({share:.0%} of predicted)", style)
    if measured["loss"] is None:
        return line.append_text(speed[2:]).append_text(money)
    line.append("loss ").append(f"{measured['loss']:.4g} ", "bold")
    room = width - line.cell_len - speed.cell_len - money.cell_len
    spark = sparkline([loss for _, loss in seen.losses], min(SPARK_MAX, room))
    return line.append(spark, "cyan").append_text(speed).append_text(money)


def _safety(job: Mapping[str, Any]) -> Text:
    line, step, safe = Text(), job["step"], job["safe_step"]
    durable, uri = job["durable_step"], job["checkpoint_uri"]
    if safe is None:
        line.append("no copy on a second node yet", "yellow")
    else:
        lost = max(step - safe, 0)
        line.append(
            f"a node's loss costs {counted(lost, 'step')}", "green" if lost < 2 else "yellow"
        )
    line.append("; ")
    if durable is not None:
        age = "" if job["durable_age_s"] is None else f" {duration(job['durable_age_s'])} ago"
        line.append(f"durable: step {durable:,}{age}", "green")
        place = "" if uri is None else f" in {uri}"
        return line.append(place, "dim")
    missing = "durable: nothing yet" if uri is not None else "no place for checkpoints"
    return line.append(missing, "yellow")


def _troubles(status: Mapping[str, Any], job: Mapping[str, Any] | None) -> list[str]:
    found = []
    if status["leader"] is None:
        found.append("no leader is elected")
    if not status["store"]["answers"]:
        found.append("the store does not answer; training goes on, commits wait")
    if job is not None:
        if job["phase"]["name"] in ("held", "waiting") and job["phase"]["reason"]:
            found.append(str(job["phase"]["reason"]))
        if job["phase"]["name"] == "held":
            found.append(cure_of_hold(job["id"], job["spent"], job["phase"]["reason"]))
        if job["storage_trouble"]:
            found.append(f"checkpoints: {job['storage_trouble']}")
        found += list(job["troubles"][:2])
    paused = status["paused"]
    found += [f"{each['id']} is {each['state']}: {each['reason']}" for each in paused[:2]]
    return found[:4]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as bars, the newest at the right; averages where there are too many."""
    if len(values) < 2 or width < 2:
        return ""
    cells = min(width, len(values))
    edges = [round(n * len(values) / cells) for n in range(cells + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(edges)]
    low, high = min(means), max(means)
    if not high > low:
        return BARS[0] * cells
    return "".join(BARS[min(int((mean - low) / (high - low) * 8), 7)] for mean in means)


def _middle(seen: ScreenData, width: int, room: int) -> list[Text]:
    """Return the map of zones and the plan, in at most ``room`` lines."""
    if seen.status is None or room < 2:
        return []
    job = seen.job
    runs = job is not None and job["phase"]["name"] not in ("held", "waiting")
    members = frozenset(job["members"] if runs and job is not None else ())
    plan = _plan_lines(job["plan"]) if runs and job is not None and job["plan"] else []
    at = seen.status["at"]
    full = zone_map(seen.nodes, members, width=width, lines=room - 1, at=at)
    # The plan gets what the map leaves, and at least its first line.
    for_plan = min(len(plan) + bool(plan), max(room - 1 - len(full), 2 if plan else 0))
    shown = zone_map(seen.nodes, members, width=width, lines=room - 1 - for_plan, at=at)
    left = room - 1 - len(shown)
    marks = "  ● computing  ○ idle  ▽ draining  ✗ lost"
    title = Text().append("zones", "bold").append(marks, "dim")
    plan = plan if len(plan) <= left else [*plan[: max(left - 1, 0)], Text("…", "dim")][:left]
    # All hints if they fit, else the first: where the page is.
    left -= len(plan) + 2
    extra = [Text(hint, "dim") for hint in seen.hints[: None if left >= len(seen.hints) else 1]]
    return [title, *shown, *plan, *([Text(), *extra, Text()] if 0 < len(extra) <= left else [])]


def _plan_lines(plan: Mapping[str, Any]) -> list[Text]:
    """Return the plan, one line for each kind of pipeline: its stages, by GPU kind and zone."""
    return [
        Text()
        .append("plan  " if n == 0 else "      ", "bold")
        .append(f"{len(kind.numbers)} x {_stages(kind.groups)}")
        for n, kind in enumerate(pipeline_kinds(plan))
    ]


def _stages(groups: Sequence[StageGroup]) -> str:
    parts: list[tuple[str, list[str]]] = []
    for group in groups:
        tp = f" tp {group.tp}" if group.tp > 1 else ""
        where = f"{group.zone} {group.gpu}{tp}"
        layers = "+".join(_layers(*each) for each in group.layers)
        if parts and parts[-1][0] == where:
            parts[-1][1].append(layers)
        else:
            parts.append((where, [layers]))
    return " → ".join(f"{where} {'|'.join(layers)}" for where, layers in parts)


def _layers(first: int, end: int) -> str:
    return str(first) if end - first == 1 else f"{first}-{end - 1}"


def _event_line(line: EventLine, seen: ScreenData) -> Text:
    job = seen.job
    about = f"{line.job}: " if line.job and (job is None or line.job != job["id"]) else ""
    text = Text(f"{clock(line.at)} ", "dim")
    return text.append(f"{about}{line.said}", COLOUR_OF_EVENT.get(line.kind, ""))


def _keys(ui: Ui, seen: ScreenData, width: int) -> Text:
    if ui.verb is not None:
        names = matches(ui.typed, [node["name"] for node in seen.nodes if node["state"] != "lost"])
        line = Text(f"{ui.verb} which node? ", "bold yellow").append(ui.typed, "bold").append("_  ")
        return line.append(" ".join(names)[: max(width - line.cell_len, 0)], "dim")
    keys = [("p", "preempt"), ("d", "drain"), *([("k", "kill")] * ui.can_kill)]
    keys += [("tab", "next job")] * (len(seen.running) > 1)
    keys += [("↑↓", "scroll"), ("q", "end" if ui.can_kill else "quit")]
    line = Text()
    for key, what in keys:
        line.append(f" {key} ", "reverse").append(f" {what}  ")
    return line


def summary(
    job: Mapping[str, Any] | None,
    moves: Sequence[Mapping[str, Any]],
    ran_s: float,
    *,
    before: tuple[int, float] = (0, 0.0),
) -> str:
    """Return the run in one line: steps, moves, steps lost, downtime, dollars.

    ``before``: the steps and dollars of the job in the first answer about it.
    """
    if job is None:
        return f"no job was there at the end, after {duration(ran_s)}"
    steps, usd = max(job["step"] - before[0], 0), job["spent"]["usd"] - before[1]
    real = [move for move in moves if move["kind"] != "start"]
    lost = sum(move["steps_lost"] for move in real)
    down = duration(sum(move["downtime_s"] for move in real))
    loss = job["measured"]["loss"]
    told = [
        f"{job['id']}: {counted(steps, 'step')} in {duration(ran_s)}",
        f"{counted(len(real), 'move')}, {counted(lost, 'step')} lost, {down} of downtime",
        f"${usd:,.2f}",
        *([] if loss is None else [f"loss {loss:.4g}"]),
    ]
    return "; ".join(told)
