"""What the online commands print for a person."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

DRAINED = "drained, safe to stop"


def status_text(status: dict[str, Any]) -> str:
    """Everything at a glance."""
    store, leader = status["store"], status["leader"]
    led = f"{leader['host']} ({leader['address']})" if leader else "nobody"
    lines = [f"cluster     {status['cluster']}, led by {led}"]
    if not store["answers"]:
        away_s = status["at"] - store["away_since"]
        lines.append(f"store       away for {span(away_s)}; the job goes on, commits wait")
        # A sailord that is older than this command does not say what it heard.
        lines += [f"            {store['trouble']}"] if store.get("trouble") else []
    elif store.get("trouble"):
        lines.append(f"store       refuses a write, and all wait for it: {store['trouble']}")
    lines += _job_lines(status["job"], status["at"]) if status["job"] else ["job         none"]
    if status["queued"]:
        lines.append(f"queue       {status['queued']} waiting")
    counts = ", ".join(f"{n} {state}" for state, n in status["nodes"].items())
    lines.append(f"nodes       {counts or 'none'}")
    for node in status["leaving"]:
        left = "" if node["leaves_at"] is None else f" in {span(node['leaves_at'] - status['at'])}"
        # A sailord that is older than this command does not say whether it is drained.
        drained = f"; {DRAINED}" if node.get("safe_to_stop") else ""
        lines.append(f"            {node['name']} goes away{left}{drained}")
    if status.get("capacity") is not None:
        lines.append(f"machines    {glance_text(status['capacity'])}")
    plan = status["job"]["plan"] if status["job"] else None
    return "\n".join([*lines, *(plan_lines(plan) if plan else [])])


def _job_lines(job: dict[str, Any], at: float) -> list[str]:
    phase, generation = job["phase"], job["generation"]
    since = "" if phase["since"] is None else f" for {span(at - phase['since'])}"
    until = "" if phase["deadline"] is None else f", at most {span(phase['deadline'] - at)} more"
    of = "" if job["steps"] is None else f" of {job['steps']}"
    lines = [f"job         {job['id']}: {phase['name']}{since}{until}"]
    if phase["reason"]:
        lines.append(f"because     {phase['reason']}")
    if generation is not None:
        members = ", ".join(job["members"][:6]) + (" ..." if len(job["members"]) > 6 else "")
        lines.append(f"generation  {generation['number']} ({generation['state']}) on {members}")
    measured, predicted = job["measured"], job["predicted"]
    loss = "" if measured["loss"] is None else f", loss {measured['loss']:.4g}"
    lines.append(f"step        {job['step']}{of}{loss}, the last {span(job['step_age_s'])} ago")
    lines.append(f"pace        {_pace(measured, predicted)}")
    lines.append(f"at risk     {job['steps_at_risk']} steps; {_kept(job)}")
    if job["storage_trouble"]:
        lines.append(f"            {job['storage_trouble']}")
    # A sailord that is older than this command does not say it.
    lines += [f"            {trouble}" for trouble in job.get("troubles", ())]
    lines.append(f"money       {_money(job['spent'])}")
    return lines


def _pace(measured: dict[str, Any], predicted: dict[str, Any]) -> str:
    is_rate, should = measured["tokens_per_s"], predicted["tokens_per_s"]
    text = f"{_number(is_rate)} tokens/s (predicted {_number(should)}"
    if is_rate is not None and should:
        text += f", so {is_rate / should:.0%}"
    stall_s = measured["stall_s"]
    return f"{text})" + ("" if not stall_s else f"; each snapshot holds it up for {stall_s:.2g} s")


def _kept(job: dict[str, Any]) -> str:
    if job["durable_step"] is None:
        return "nothing durable yet"
    age_s = job["durable_age_s"]
    ago = "" if age_s is None else f", {span(age_s)} ago"
    return f"durable up to step {job['durable_step']}{ago}"


def _money(spent: dict[str, Any]) -> str:
    rate = spent["usd_per_hour"]
    text = "no price is known" if rate is None else f"${rate:,.2f} an hour"
    text += f", ${spent['usd']:,.2f} so far"
    if spent["unpriced_s"]:
        text += f" without {span(spent['unpriced_s'])} at unknown prices"
    return text if spent["usd_max"] is None else f"{text}, of ${spent['usd_max']:,.2f} at most"


def glance_text(capacity: dict[str, Any]) -> str:
    """Rented machines in one line."""
    counts = [f"{capacity['up']} of {capacity['wanted']} wanted are up"]
    counts += [f"{capacity[key]} {key}" for key in ("awaited", "asked") if capacity[key]]
    if capacity["resting"]:
        count = capacity["resting"]
        counts.append(f"{count} pool{'' if count == 1 else 's'} refused of late")
    if capacity["stop"]:
        counts.append("the budget is spent")
    return f"{', '.join(counts)}; ${capacity['usd_per_hour']:,.2f} an hour"


PIPELINES_MAX = 4
"""Columns beside each other; further ones stand below."""


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """The plan as a table: a row for each stage, a column for each kind of pipeline."""
    kinds: dict[str, list[int]] = {}
    for number, pipeline in enumerate(plan["pipelines"]):
        kinds.setdefault("\n".join(_stage_cells(pipeline)), []).append(number)
    lines = []
    columns = [(numbers, cells.split("\n")) for cells, numbers in kinds.items()]
    for begin in range(0, len(columns), PIPELINES_MAX):
        shown = columns[begin : begin + PIPELINES_MAX]
        rows = [("stage", *(_numbered(numbers) for numbers, _ in shown))]
        for stage in range(max(len(cells) for _, cells in shown)):
            cells = (each[stage] if stage < len(each) else "" for _, each in shown)
            rows.append((str(stage), *cells))
        lines += ["", *table(rows)]
    return lines


def _numbered(numbers: list[int]) -> str:
    """The pipelines of one kind, by their numbers: 0-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    said = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"pipeline {said}" if len(numbers) == 1 else f"pipelines {said}"


def _stage_cells(pipeline: dict[str, Any]) -> list[str]:
    cells = []
    for stage in pipeline["stages"]:
        place = stage["places"][0] if "places" in stage else stage
        first, end = stage["layers"]
        device = f"{place['gpu']} tp {stage['tp']}"
        cells.append(f"{first}-{end - 1} {device} {place['zone']}")
    return cells


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows with their columns aligned; the first is the heading."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(r, widths, strict=True)).rstrip()
            for r in rows]  # fmt: skip


def nodes_text(nodes: list[dict[str, Any]]) -> str:
    """All nodes."""
    rows = [("node", "state", "zone", "machine", "gpus", "taking", "step")]
    for n in nodes:
        taking, step = n["taking"] or "-", "-" if n["step"] is None else str(n["step"])
        gpus = f"{n['gpus']} x {n['gpu']}" + (" spot" if n["spot"] else "")
        state = DRAINED if n.get("safe_to_stop") else n["state"]
        rows.append((n["name"], state, n["zone"], n["machine"], gpus, taking, step))
    # A sailord that is older than this command does not say it.
    unsound = [f"{n['name']}: {why}" for n in nodes if (why := n.get("unsound"))]
    slow = [f"{n['name']} is slow: {how}" for n in nodes if (how := n.get("slow"))]
    return "\n".join([*table(rows), *unsound, *slow])


def jobs_text(jobs: list[dict[str, Any]]) -> str:
    """All jobs."""
    rows = [("job", "state", "priority", "submitted", "reason")]
    for job in jobs:
        submitted = moment(job["submitted_at"])
        rows.append((job["id"], job["state"], str(job["priority"]), submitted, job["reason"]))
    return "\n".join(table(rows))


def happening_text(happening: dict[str, Any]) -> str:
    """One line of what happened."""
    about = f"{happening['job']}: " if happening.get("job") else ""
    return f"{moment(happening['at'])}  {about}{happening['text']}"


def moves_text(moves: list[dict[str, Any]]) -> str:
    """What each move took, phase by phase, and in brackets what was predicted of each."""
    if not moves:
        return "no move yet"
    names = list(dict.fromkeys(name for move in moves for name, _ in move["phases"]))
    rows = [("when", "kind", "to", "took", "lost", "downtime", "predicted", *names)]
    for move in moves:
        predicted = {name: f" ({seconds:.2f})" for name, seconds in move.get("predicted", ())}
        phases = {
            name: f"{seconds:.2f}{predicted.get(name, '')}" for name, seconds in move["phases"]
        }
        # Before a start nothing ran that could have lost anything.
        lost = ("-", "-", "-") if move["kind"] == "start" else _lost(move)
        rows.append(
            (
                moment(move["at"]),
                move["kind"],
                str(move["generation"]),
                f"{move['total_s']:.2f} s",
                *lost,
                *(phases.get(name, "-") for name in names),
            )
        )
    return "\n".join(table(rows))


def _lost(move: dict[str, Any]) -> tuple[str, ...]:
    downtime, predicted = f"{move['downtime_s']:.2f} s", f"{move['predicted_s']:.2f} s"
    return f"{move['steps_lost']} steps", downtime, predicted


def why_text(why: dict[str, Any]) -> str:
    """Why the job is where it is."""
    phase = why["phase"]["name"] if why["phase"] else why["state"]
    lines = [f"{why['job']} is {phase}: {(why['phase'] or why)['reason']}"]
    if why.get("waits_for"):
        lines.append(f"before it: {', '.join(why['waits_for'])}")
    if why["generation_reason"]:
        lines.append(f"this generation: {why['generation_reason']}")
    lines += [f"this plan: {sentence}" for sentence in why["plan"]]
    lines += ["before:", *(f"  {happening_text(line)}" for line in why["last"])]
    return "\n".join([*lines, *away_text(why)])


def history_text(history: dict[str, Any]) -> str:
    """A job's transitions, each with its reason."""
    lines = [*map(happening_text, history["history"]), *away_text(history)]
    return "\n".join(lines) or "nothing yet"


def away_text(value: dict[str, Any]) -> list[str]:
    """Say that this is only what sailord remembers, if so; an older one does not tell."""
    since = value.get("store_away_since")
    told = "the store is away since {}; this is what sailord remembers"
    return [] if since is None else [told.format(moment(since))]


def moment(at: float) -> str:
    """A moment, to the second."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def span(seconds: float) -> str:
    """A span of time in its own unit."""
    if seconds < 120:
        return f"{max(seconds, 0.0):.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
