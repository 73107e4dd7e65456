"""What the online commands print for a person."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any


def status_text(status: dict[str, Any]) -> str:
    """Everything at a glance."""
    store = status["store"]
    leader = status["leader"]
    lines = [
        f"cluster     {status['cluster']}, led by "
        + (f"{leader['host']} ({leader['address']})" if leader else "nobody"),
    ]
    if not store["answers"]:
        away_s = status["at"] - store["away_since"]
        lines.append(f"store       away for {span(away_s)}; the job goes on, commits wait")
    lines += _job_lines(status["job"], status["at"]) if status["job"] else ["job         none"]
    if status["queued"]:
        lines.append(f"queue       {status['queued']} waiting")
    counts = ", ".join(f"{n} {state}" for state, n in status["nodes"].items())
    lines.append(f"nodes       {counts or 'none'}")
    for node in status["leaving"]:
        left = "" if node["leaves_at"] is None else f" in {span(node['leaves_at'] - status['at'])}"
        lines.append(f"            {node['name']} goes away{left}")
    return "\n".join(lines)


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
    lines.append(f"step        {job['step']}{of}, the last {span(job['step_age_s'])} ago")
    measured, predicted = job["measured"], job["predicted"]
    lines.append(
        f"pace        {_number(measured['tokens_per_s'])} tokens/s"
        f" (predicted {_number(predicted['tokens_per_s'])})"
    )
    durable = job["durable_step"]
    kept = "nothing durable yet" if durable is None else f"durable up to step {durable}"
    lines.append(f"at risk     {job['steps_at_risk']} steps; {kept}")
    if predicted["usd_per_hour"] is not None:
        lines.append(f"price       ${predicted['usd_per_hour']:.2f} an hour")
    return lines + (_plan_lines(job["plan"]) if job["plan"] else [])


def _plan_lines(plan: dict[str, Any]) -> list[str]:
    rows = [("pipeline", "stage", "layers", "device", "zone", "node")]
    for p, pipeline in enumerate(plan["pipelines"]):
        for s, stage in enumerate(pipeline["stages"]):
            place = stage["places"][0] if "places" in stage else stage
            layers = f"{stage['layers'][0]}-{stage['layers'][1] - 1}"
            device = f"{place['gpu']} tp {stage['tp']}"
            rows.append((str(p), str(s), layers, device, place["zone"], place.get("node", "")))
    return ["", *table(rows)]


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
        rows.append((n["name"], n["state"], n["zone"], n["machine"], gpus, taking, step))
    return "\n".join(table(rows))


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


def why_text(why: dict[str, Any]) -> str:
    """Why the job is where it is."""
    phase = why["phase"]["name"] if why["phase"] else why["state"]
    lines = [f"{why['job']} is {phase}: {(why['phase'] or why)['reason']}"]
    if why["generation_reason"]:
        lines.append(f"this generation: {why['generation_reason']}")
    lines += [f"this plan: {sentence}" for sentence in why["plan"]]
    return "\n".join([*lines, "before:", *(f"  {happening_text(line)}" for line in why["last"])])


def moment(at: float) -> str:
    """A moment, to the second."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def span(seconds: float) -> str:
    """A span of time in its own unit."""
    if seconds < 120:
        return f"{max(seconds, 0.0):.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
