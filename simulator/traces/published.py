"""Convert published logs of spot availability to traces.

| format | file |
|---|---|
| ``bamboo-events`` | lines ``<time>,add|remove,<node>`` |
| ``bamboo-counts`` | lines ``<date>, <time>, <nodes>`` |
| ``dated-counts`` | lines ``<date and time>,<nodes>``, as Bamboo's of one group of machines |
| ``counts`` | lines ``<time>,<nodes>``, as Parcae's |
| ``parcae`` | lines ``[<time>, "add"|"remove"|..., {"nodes": [...], "duration": <time>}]`` |
| ``skypilot`` | JSON with ``metadata.gap_seconds`` and ``data``, nodes at equal intervals |
| ``sailord`` | lines ``{"at": <seconds>, "gpus": {"<gpu>@<zone>": <count>}}``, sailord's own logs |

A line without digits above the others is a heading. Times without a unit are milliseconds.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from operator import itemgetter
from typing import Any

from simulator.documents.problems import InputError, Problem

TIMES_END_S = 253_402_300_800
"""Seconds from 1970 to the year 10000, where dates end."""
COUNT_MAX = 10**7
"""Far above any log; more nodes or GPUs are a mistake."""
UNITS: Mapping[str, float] = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
"""Seconds of the units in which a log may give its times."""
SURE_S = 3600.0
"""A log of fewer seconds, if its times were milliseconds, probably has them in another unit."""
Counts = Mapping[str, int]
"""GPUs by pool, named ``<gpu>@<zone>``."""
NodesByKind = Mapping[str, tuple[str, ...]]
"""The names of the nodes by pool, where the log has them."""


@dataclass(frozen=True, slots=True)
class Series:
    """GPUs over time: each count holds until the next one."""

    points: tuple[tuple[float, Counts], ...]
    """Ordered by time, the first at 0."""
    end_s: float
    nodes: tuple[NodesByKind, ...]
    """Of each point."""
    begins: datetime | None = None
    """The date and time of second 0, if the log has it."""

    def without_names(self) -> Series:
        """The same counts, without points that change names only."""
        points = [
            point
            for number, point in enumerate(self.points)
            if not number or point[1] != self.points[number - 1][1]
        ]
        return replace(self, points=tuple(points), nodes=({},) * len(points))

    @property
    def share_up(self) -> float:
        """The share of the time in which any GPU is up."""
        times = [*(at_s for at_s, _ in self.points), self.end_s]
        lasts_s = (two - one for one, two in pairwise(times))
        up = (any(counts.values()) for _, counts in self.points)
        return sum(s for s, is_up in zip(lasts_s, up, strict=True) if is_up) / self.end_s


@dataclass(frozen=True, slots=True)
class LogFile:
    """A published file, and the pool that it is about."""

    name: str
    text: str
    pool: str
    gpus_per_node: int
    unit: str | None = None
    """Of its times, if they have none and the user has said it."""


def series_of(file: LogFile) -> Series:
    """Read a file of any format."""
    points, end_s = read_points(file)
    if not points:
        raise InputError(Problem(file.name, "has no entry", "give a file as it was published"))
    kept = list(_from_zero(points))
    counts, nodes = tuple(each[:2] for each in kept), tuple(each[2] for each in kept)
    start_s = points[0][0]
    if end_s <= start_s:
        what = "covers no time: all entries are of the same moment"
        raise InputError(Problem(file.name, what, "give a log of a longer time"))
    begins = datetime.fromtimestamp(start_s, UTC) if format_of(file) == "sailord" else None
    return Series(counts, end_s - start_s, nodes, begins)


def read_points(file: LogFile) -> tuple[_Points, float]:
    """Return all entries of a file and its end; raise ``InputError`` if one cannot be read."""
    try:
        points, end_s = _READERS[format_of(file)](file)
        _check_times(points, end_s)
    except InputError:
        raise
    except (
        *(ValueError, KeyError, TypeError, IndexError, AttributeError),
        *(OverflowError, RecursionError),
    ) as error:
        what = f"could not be read as {format_of(file)}: {error}"
        raise InputError(Problem(file.name, what, "give a file as it was published")) from None
    for number, (one, two) in enumerate(pairwise(points), 2):
        if two[0] < one[0]:
            what = f"goes back in time: its entry {number} is earlier than the one before"
            raise InputError(Problem(file.name, what, "sort its entries by time"))
    return points, end_s


def assumed_of(file: LogFile, series: Series) -> str:
    """Return what a file does not say and is assumed; empty: nothing."""
    kind = format_of(file)
    if kind == "skypilot":
        share = f"some are for {series.share_up:.0%} of the time"
        return f"its numbers are read as nodes that are available, and {share}"
    return f"its times are read as {file.unit or 'ms'}" if kind in _WITHOUT_UNIT else ""


def _check_times(points: _Points, end_s: float) -> None:
    """Refuse times that are not in seconds, such as milliseconds since 1970."""
    for at_s in (*(point[0] for point in points), end_s):
        if not 0 <= at_s < TIMES_END_S:
            raise ValueError(f"{at_s:g} s is not a time in seconds from 0 to the year 9999")


def _whole(value: object) -> int:
    """Return a number of nodes or GPUs."""
    count = float(value)  # type: ignore[arg-type]  # what is no number raises an error
    if not 0 <= count <= COUNT_MAX or count != int(count):
        raise ValueError(f"{value} is not a number of nodes or GPUs")
    return int(count)


def format_of(file: LogFile) -> str:
    """Recognise the format by the first line."""
    text = file.text.lstrip()
    first = text.partition("\n")[0].strip()
    if first.startswith("[") and '"nodes"' in first:
        return "parcae"
    if first.startswith("{"):
        return "sailord" if '"at"' in first and '"gpus"' in first else "skypilot"
    fields = next(iter(_rows(text)), [])
    if len(fields) == 3:
        return "bamboo-events" if fields[1] in ("add", "remove") else "bamboo-counts"
    if len(fields) == 2:
        return "dated-counts" if ":" in fields[0] else "counts"
    what = f'begins with "{first[:40]}", which no known format does'
    known = ", ".join(_READERS)
    raise InputError(Problem(file.name, what, f"give a file in one of these formats: {known}"))


def merged(series: Sequence[Series]) -> Series:
    """Merge logs of different pools, aligned at their starts; the result ends with the shortest."""
    end_s = min(each.end_s for each in series)
    moments = sorted({at_s for each in series for at_s, _ in each.points if at_s < end_s})
    points: list[tuple[float, Counts]] = []
    nodes: list[NodesByKind] = []
    for now_s in moments:
        counts: dict[str, int] = {}
        names: dict[str, tuple[str, ...]] = {}
        for each in series:
            last = bisect_right(each.points, now_s, key=itemgetter(0)) - 1
            for pool, gpus in each.points[last][1].items():
                counts[pool] = counts.get(pool, 0) + gpus
            for pool, named in each.nodes[last].items():
                names[pool] = (*names.get(pool, ()), *named)
        if not points or (points[-1][1], nodes[-1]) != (counts, names):
            points.append((now_s, counts))
            nodes.append(names)
    begins = {each.begins for each in series}
    return Series(tuple(points), end_s, tuple(nodes), begins.pop() if len(begins) == 1 else None)


def trace_document(series: Series, source: str, assumed: Sequence[str] = ()) -> dict[str, Any]:
    """The trace file, in the form of recorded points; ``assumed`` is for its readers."""
    begins = {} if series.begins is None else {"starts_at": series.begins.isoformat()}
    pools = {pool for counts in series.points for pool in counts[1]}
    return {
        "source": source,
        **({"conventions": list(assumed)} if assumed else {}),
        **begins,
        "points": [
            {
                "time_s": at_s,
                "available": [
                    _entry(pool, n, names.get(pool), pools) for pool, n in sorted(counts.items())
                ],
            }
            for (at_s, counts), names in zip(series.points, series.nodes, strict=True)
        ],
        "end_s": series.end_s,
    }


def _entry(
    pool: str, gpus: int, nodes: Sequence[str] | None, pools: Collection[str]
) -> dict[str, Any]:
    gpu, _, zone = pool.removesuffix(_SPOT).partition("@")
    entry: dict[str, Any] = {"gpu_type": gpu, "zone": zone, "gpus": gpus}
    if nodes is not None:
        entry["nodes"] = list(nodes)
    # The contract is said where the log is about both.
    if pool.endswith(_SPOT) or f"{pool}{_SPOT}" in pools:
        entry["spot"] = pool.endswith(_SPOT)
    return entry


_SPOT = " spot"
_Point = tuple[float, Counts, NodesByKind]
_Points = list[_Point]


def _from_zero(points: _Points) -> Iterator[_Point]:
    """Yield the last entry of each moment, counted from the first, if it changes something."""
    start_s = points[0][0]
    before: tuple[Counts, NodesByKind] | None = None
    for number, (at_s, counts, nodes) in enumerate(points):
        follows = number + 1 < len(points) and points[number + 1][0] == at_s
        if not follows and (counts, nodes) != before:
            yield at_s - start_s, counts, nodes
            before = counts, nodes


def _rows(text: str) -> list[list[str]]:
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if lines and not any(map(str.isdigit, lines[0])):
        lines = lines[1:]
    return [[part.strip() for part in line.split(",")] for line in lines]


def _in_seconds(points: _Points, file: LogFile) -> _Points:
    """Return the points of a log that gives times without their unit."""
    times = [at for at, _, _ in points]
    as_ms_s = (times[-1] - times[0]) * UNITS["ms"]
    if file.unit is None and 0 < as_ms_s < SURE_S and any(at % 1000 for at in times):
        what = f"has times from {times[0]:g} to {times[-1]:g}; in ms that would be {as_ms_s:.3g} s"
        cure = f"say their unit with --unit ({', '.join(UNITS)})"
        raise InputError(Problem(file.name, what, cure))
    each_s = UNITS[file.unit or "ms"]
    return [(round(at * each_s, 6), counts, nodes) for at, counts, nodes in points]


def _bamboo_events(file: LogFile) -> tuple[_Points, float]:
    up: set[str] = set()
    points: _Points = []
    for at, what, node in _rows(file.text):
        if what == "add":
            up.add(node)
        elif what != "remove":
            raise ValueError(f'"{what}" is neither add nor remove')
        elif node not in up:
            raise ValueError(f'"{node}" is removed, and was not added')
        else:
            up.remove(node)
        points.append(_named(float(at), up, file))
    points = _in_seconds(points, file)
    return points, points[-1][0] + _step_s(points)


def _named(at_s: float, up: set[str], file: LogFile) -> _Point:
    nodes = tuple(sorted(up))
    return at_s, {file.pool: len(nodes) * file.gpus_per_node}, {file.pool: nodes}


def _step_s(points: _Points) -> float:
    """The interval of the log: the shortest between two entries.

    Its last entry holds for as long.
    """
    times = sorted({point[0] for point in points})
    return min((two - one for one, two in pairwise(times)), default=0.0)


def _bamboo_counts(file: LogFile) -> tuple[_Points, float]:
    """A published log has entries for the minutes ahead; a later line corrects them."""
    points: _Points = []
    first = 0  # Of the latest entries with the same count.
    for day, time, count in _rows(file.text):
        at = datetime.fromisoformat(f"{day}T{time}+00:00").timestamp()
        counts = {file.pool: _whole(count) * file.gpus_per_node}
        if points and at >= points[first][0]:
            for number in range(first, len(points)):
                points[number] = (min(at, points[number][0]), *points[number][1:])
        if points and counts != points[-1][1]:
            first = len(points)
        points.append((at, counts, {}))
    return points, points[-1][0]


def _dated_counts(file: LogFile) -> tuple[_Points, float]:
    points: _Points = []
    for moment, count in _rows(file.text):
        at = datetime.fromisoformat(moment)
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
        points.append((at.timestamp(), {file.pool: _whole(count) * file.gpus_per_node}, {}))
    return points, points[-1][0] + _step_s(points)


def _counts(file: LogFile) -> tuple[_Points, float]:
    points: _Points = [
        (float(at), {file.pool: _whole(count) * file.gpus_per_node}, {})
        for at, count in _rows(file.text)
    ]
    points = _in_seconds(points, file)
    return points, points[-1][0] + _step_s(points)


def _parcae(file: LogFile) -> tuple[_Points, float]:
    up: set[str] = set()
    points: _Points = []
    lasts = 0.0
    for line in filter(None, map(str.strip, file.text.splitlines())):
        at, what, about = json.loads(line)
        if what == "add":
            up.update(about["nodes"])
        elif what == "remove":
            up.difference_update(about["nodes"])
        points.append(_named(float(at), up, file))
        lasts = about["duration"]
    points = _in_seconds(points, file)
    return points, points[-1][0] + round(lasts * UNITS[file.unit or "ms"], 6)


def _skypilot(file: LogFile) -> tuple[_Points, float]:
    document = json.loads(file.text)
    gap_s = float(document["metadata"]["gap_seconds"])
    counts = [_whole(count) * file.gpus_per_node for count in document["data"]]
    points: _Points = [
        (number * gap_s, {file.pool: gpus}, {}) for number, gpus in enumerate(counts)
    ]
    return points, len(counts) * gap_s


def _sailord(file: LogFile) -> tuple[_Points, float]:
    """Of several leaders' logs, one after another in the text, the latest entry holds."""
    points: _Points = []
    pools: dict[str, int] = {}
    entries = [json.loads(line) for line in file.text.splitlines() if line.strip()]
    entries.sort(key=itemgetter("at"))
    for entry in entries:
        entry["gpus"] = {pool: _whole(gpus) for pool, gpus in entry["gpus"].items()}
        pools |= dict.fromkeys(entry["gpus"], 0)
    for entry in entries:
        points.append((float(entry["at"]), pools | entry["gpus"], {}))
    return points, points[-1][0]


_WITHOUT_UNIT = ("bamboo-events", "counts", "parcae")
_READERS: dict[str, Callable[[LogFile], tuple[_Points, float]]] = {
    "bamboo-events": _bamboo_events,
    "bamboo-counts": _bamboo_counts,
    "dated-counts": _dated_counts,
    "counts": _counts,
    "parcae": _parcae,
    "skypilot": _skypilot,
    "sailord": _sailord,
}
