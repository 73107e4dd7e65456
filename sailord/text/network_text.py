"""The measured network as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sailord.text.table import table
from sailord.text.units import timestamp

HEADER = ("from", "to", "flows", "one way", "large messages", "nine of ten", "1 MiB", "measured")
MIB = 1 << 20
FAILURES_SHOWN = 5


def network_text(view: Mapping[str, Any]) -> str:
    """Return a table of links, and what was not used or not measured."""
    parts = []
    if view["links"]:
        parts.append(table(HEADER, [_row(link) for link in view["links"]]))
    else:
        parts.append("no link was measured yet; measure them with: sailorctl profile network")
    parts += _notes(view)
    return "\n".join(parts)


def _row(link: Mapping[str, Any]) -> tuple[str, ...]:
    ways = "both ways" if link["both_ways"] else str(link["flows"])
    measured = [point for point in link["points"] if point["is_measured"]]
    last, middle = measured[-1], next((p for p in measured if p["size_bytes"] == MIB), None)
    scale = link["bytes_per_s"] * last["seconds"]
    band = f"{_rate(scale / last['high_s'])} to {_rate(scale / last['low_s'])}"
    return (
        f"{link['from_gpu']}@{link['from_zone']}",
        f"{link['to_gpu']}@{link['to_zone']}",
        ways,
        _milliseconds(link["round_trip_s"] / 2),
        _rate(link["bytes_per_s"]),
        band,
        "-" if middle is None else _milliseconds(middle["seconds"]),
        f"{link['measurements']} x, {timestamp(link['newest_at'])}",
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.1f} MB/s"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _notes(view: Mapping[str, Any]) -> list[str]:
    notes = [
        f"not used: {_ends(each)}: {each['why']}" for each in view["flagged"][-FAILURES_SHOWN:]
    ]
    more = len(view["flagged"]) - len(notes)
    if more > 0:
        notes.append(f"not used: {more} more")
    notes += [f"no report of {node} is used: most of them are absurd" for node in view["liars"]]
    failures = view["failures"][-FAILURES_SHOWN:]
    notes += [f"failed at {timestamp(f['at'])}: {_ends(f)}: {f['why']}" for f in failures]
    return notes


def _ends(each: Mapping[str, Any]) -> str:
    return f"{each['sender'].partition('.')[0]} to {each['receiver'].partition('.')[0]}"
