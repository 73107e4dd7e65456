"""Text of ``sailorctl goodput``."""

from __future__ import annotations

from typing import Any

from sailord.text.table import table
from sailord.text.units import duration, timestamp

IN_STEP = "step_under_way"
"""Not decided yet."""
SMALL_USD = 0.005
SHARES_SHOWN = 10
"""Days, and jobs; JSON has all."""


def goodput_text(found: dict[str, Any]) -> str:
    """Return the causes with their GPU hours and dollars, and the sums."""
    if found["goodput"] is None:
        return "nothing was booked yet: no node has joined since the ledger began"
    lately = _lately(found)
    rows = [
        (each["label"], f"{each['share']:.1%}", lately.get(each["cause"], "-"),
         _hours(each["gpu_s"]), f"${each['usd']:,.2f}", each["text"])
        for each in found["causes"]
    ]  # fmt: skip
    wasted_s, cost = found["not_training_gpu_s"], f"${found['not_training_usd']:,.2f}"
    share = wasted_s / max(sum(each["gpu_s"] for each in found["causes"]), 1e-9)
    rows.append(("not training", f"{share:.1%}", "", _hours(wasted_s), cost, "in all"))
    rows.append(("all", "100.0%", "", _hours(found["gpu_s"]), f"${found['usd']:,.2f}", ""))
    lines = [
        f"goodput {found['goodput']:.1%} since {timestamp(found['since'])}; "
        f"{found['gpus']} GPUs at ${found['usd_per_hour']:,.2f} an hour now",
        *_last_lines(found),
        "",
        table(("cause", "share", _span_of(found), "GPU h", "cost", "what it is"), rows),
    ]
    for key, title in (("days", "day (UTC)"), ("jobs", "job")):
        if shares := found[key]:
            shown = list(map(_share_row, shares[:SHARES_SHOWN]))
            lines += ["", table((title, "goodput", "GPU h", "cost"), shown)]
            if len(shares) > SHARES_SHOWN:
                lines.append(f"and {len(shares) - SHARES_SHOWN} more: --json")
    if found["jobs"]:
        lines.append("a job's cost is that of all nodes while it had the cluster; `status` counts "
                     "those of its plan only")  # fmt: skip
    if found["unpriced_gpu_s"]:
        lines.append(f"{_hours(found['unpriced_gpu_s'])} GPU h had no known price; see prices in "
                     "the cluster file (docs/formats.md)")  # fmt: skip
    if found["ahead_usd"] >= SMALL_USD:
        lines.append(f"${found['ahead_usd']:,.2f} more is booked than was billed: an instance "
                     "ended before sailord knew; later bookings make up for it")  # fmt: skip
    return "\n".join(lines)


def _span_of(found: dict[str, Any]) -> str:
    """Return the heading of the shares of the last minutes."""
    minutes = found.get("last_minutes")
    return f"last {duration(minutes['until'] - minutes['since'])}" if minutes else "lately"


def _lately(found: dict[str, Any]) -> dict[str, str]:
    """Return each cause's share of the last ten minutes; an older sailord does not say it."""
    minutes = found.get("last_minutes")
    if not minutes or not minutes["gpu_s"]:
        return {}
    return {each["cause"]: f"{each['gpu_s'] / minutes['gpu_s']:.1%}" for each in minutes["causes"]}


def _last_lines(found: dict[str, Any]) -> list[str]:
    """Return what was booked within ten minutes and an hour; an older sailord does not say it."""
    minutes, hour = found.get("last_minutes"), found.get("last_hour")
    is_same = minutes is not None and hour is not None and minutes["since"] == hour["since"]
    spans = (None if is_same else minutes, hour)
    labels = {each["cause"]: each["label"] for each in found["causes"]}
    return [_last_line(each, labels) for each in spans if each and each["goodput"] is not None]


def _last_line(last: dict[str, Any], labels: dict[str, str]) -> str:
    wasted = [each for each in last["causes"] if each["cause"] not in ("training", IN_STEP)]
    most = max(wasted, key=lambda each: float(each["gpu_s"]), default=None)
    usd = sum(each["usd"] for each in wasted)
    why = "" if most is None else f", most of it {labels[most['cause']]} (${most['usd']:,.2f})"
    span = duration(last["until"] - last["since"])
    return (
        f"last {span}: goodput {last['goodput']:.1%}, ${last['usd']:,.2f}; "
        f"${usd:,.2f} of that not training{why}"
    )


def _share_row(share: dict[str, Any]) -> tuple[str, ...]:
    """Return a day or a job; the rest has no times."""
    name = share["name"] or "no job"
    goodput = "-" if share["goodput"] is None else f"{share['goodput']:.1%}"
    return (
        name if share["since"] is not None else "earlier",
        *(goodput, _hours(share["gpu_s"]), f"${share['usd']:,.2f}"),
    )


def _hours(gpu_s: float) -> str:
    return f"{gpu_s / 3600:,.2f}"
