"""The nodes as a map: a line for each zone, with a mark for each node, or with their numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.text import Text

from sailord.text.units import counted, duration

MARKS: Mapping[str, tuple[str, str]] = {
    "computing": ("●", "green"),
    "idle": ("○", "dim"),
    "joining": ("+", "cyan"),
    "cordoned": ("=", "dim"),
    "slow": ("~", "magenta"),
    "draining": ("▽", "yellow"),
    "suspect": ("?", "red"),
    "lost": ("✗", "bold red"),
    "unreadable": ("!", "red"),
}
"""A node's mark and colour, by what it does."""
UNWELL = ("lost", "suspect", "draining", "slow", "unreadable")


def activity_of(node: Mapping[str, Any], members: Collection[str]) -> str:
    """Return what a node does, as a key of ``MARKS``."""
    state = str(node["state"])
    if state != "ready":
        return state if state in MARKS else "unreadable"
    return "computing" if node["name"] in members else "idle"


def zone_map(
    nodes: Sequence[Mapping[str, Any]],
    members: Collection[str],
    *,
    width: int,
    lines: int,
    at: float,
) -> list[Text]:
    """Return the map in at most ``lines`` lines: with names if they fit, else with numbers."""
    zones: dict[str, list[Mapping[str, Any]]] = {}
    for node in nodes:
        zones.setdefault(node["zone"], []).append(node)
    if not zones or lines < 1:
        return []
    names = [
        line
        for zone in sorted(zones, key=_natural)
        for line in _with_names(zone, zones[zone], members, width=width, at=at)
    ]
    if len(names) <= lines:
        return names
    # Zones with troubled nodes first, then the largest.
    order = sorted(zones, key=lambda zone: (-_count_unwell(zones[zone]), -len(zones[zone]), zone))
    shown = order if len(order) <= lines else order[: lines - 1]
    column = max(len(zone) for zone in shown)
    found = [
        _with_numbers(zone.ljust(column), zones[zone], members, at=at)
        for zone in sorted(shown, key=_natural)
    ]
    rest = order[len(shown) :]
    if rest:
        others = [node for zone in rest for node in zones[zone]]
        found.append(_with_numbers(counted(len(rest), "more zone"), others, members, at=at))
    return found


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts numbers within names by their value."""
    return [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part)
        for part in re.split(r"([0-9]+)", name)
    ]


def _count_unwell(nodes: Sequence[Mapping[str, Any]]) -> int:
    return sum(node["state"] in UNWELL for node in nodes)


def _with_names(
    zone: str,
    nodes: Sequence[Mapping[str, Any]],
    members: Collection[str],
    *,
    width: int,
    at: float,
) -> list[Text]:
    """One zone, with the name of each node; as many lines as they take."""
    kinds = Counter(_gpus(node) for node in nodes if node["gpus"])
    head = Text().append(f"{zone}  ", "bold")
    lines = [head]
    for node in nodes:
        cell = _cell(node, members, at)
        if lines[-1].cell_len + cell.cell_len > width and lines[-1].cell_len > len(zone) + 2:
            lines.append(Text(" " * (len(zone) + 2)))
        lines[-1].append_text(cell).append(" ")
    about = ", ".join(kinds)
    if about and lines[-1].cell_len + len(about) + 1 <= width:
        lines[-1].append(" " + about, "dim")
    return lines


def _gpus(node: Mapping[str, Any]) -> str:
    return str(node["gpu"]) if node["gpus"] == 1 else f"{node['gpus']} x {node['gpu']}"


def _cell(node: Mapping[str, Any], members: Collection[str], at: float) -> Text:
    doing = activity_of(node, members)
    mark, style = MARKS[doing]
    cell = Text(f"{mark}{node['name']}", style)
    if doing == "draining" and node["leaves_at"] is not None:
        left = node["leaves_at"] - at
        cell.append(f"({duration(left) if left > 0 else 'over'})")
    if node["safe_to_stop"]:
        cell.append("(safe to stop)", "green")
    return cell


def _with_numbers(
    zone: str, nodes: Sequence[Mapping[str, Any]], members: Collection[str], *, at: float
) -> Text:
    """One zone in one line: how many nodes do what, then the names of nodes with trouble."""
    counts = Counter(activity_of(node, members) for node in nodes)
    line = Text().append(f"{zone}  ", "bold")
    for doing, (mark, style) in MARKS.items():
        if counts[doing]:
            line.append(f"{mark}{counts[doing]:,} {doing}", style).append("  ")
    for node in nodes:
        if node["state"] in UNWELL:
            line.append_text(_cell(node, members, at)).append(" ")
    return line
