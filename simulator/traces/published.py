"""Converts published logs of spot availability to traces.

| format | file |
|---|---|
| ``bamboo-events`` | lines ``<time>,add|remove,<node>`` |
| ``bamboo-counts`` | lines ``<date>, <time>, <nodes>`` |
| ``dated-counts`` | lines ``<date and time>,<nodes>``, as Bamboo's of one group of machines |
| ``counts`` | lines ``<time>,<nodes>``, as Parcae's |
| ``parcae`` | lines ``[<time>, "add"|"remove"|..., {"nodes": [...], "duration": <time>}]`` |
| ``skypilot`` | JSON with ``metadata.gap_seconds`` and ``data``, nodes at equal intervals |
| ``sailord`` | lines ``{"at": <seconds>, "gpus": {"<gpu>@<zone>": <count>}}``, sailord's own logs |

A first line without a number is a heading. Times without a unit are milliseconds.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from math import nan
from operator import itemgetter
from typing import Any

from simulator.documents.problems import InputError, Problem
from simulator.traces.sailord_log import (
    TIMES_END_S,
    Counts,
    LogLine,
    counts_over_time,
    is_sailord_log,
    read_lines,
    whole_number,
)

UNITS: Mapping[str, float] = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
"""Seconds of the units in which a log may give its times."""
SURE_S = 3600.0
"""A log of fewer seconds, if its times were milliseconds, probably has them in another unit."""
NodesByKind = Mapping[str, tuple[str, ...]]
"""The names of the nodes by pool, where the log has them."""


@dataclass(frozen=True, slots=True)
class Series:
    """GPUs over time: each count holds until the next one."""

    points: tuple[tuple[float, Counts], ...]
    """Ordered by time, the first at 0."""
    end_s: float
    nodes: tuple[NodesByKind, ...]
    """Names of the nodes at each point."""
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
    """The unit of its times, if the user has given one that the file lacks."""


def series_of(file: LogFile) -> Series:
    """Read a file of any format."""
    return _series(file.name, *read_points(file))


def series_of_leaders(logs: Sequence[LogFile]) -> Series:
    """Merge sailord's logs, those of successive leaders, by their times."""
    points = _read_own_points(map(own_lines, logs))
    series = _series(logs[0].name, points, points[-1][0])
    return replace(series, begins=datetime.fromtimestamp(points[0][0], UTC))


def own_lines(log: LogFile) -> list[LogLine]:
    """Read a log of sailord; refuse one that has damaged lines only."""
    lines = read_lines(log.text)
    if all(line.gpus is None for line in lines):
        what = f"has no line that can be read: line {lines[0].number} is {lines[0].flaw}"
        raise InputError(Problem(log.name, what, "leave this file out"))
    return lines


def _series(name: str, points: _Points, end_s: float) -> Series:
    kept = list(_count_from_zero(points))
    counts, nodes = tuple(each[:2] for each in kept), tuple(each[2] for each in kept)
    start_s = points[0][0]
    if end_s <= start_s:
        what = "covers no time: all entries are of the same moment"
        raise InputError(Problem(name, what, "give a log of a longer time"))
    return Series(counts, end_s - start_s, nodes)


def read_points(file: LogFile) -> tuple[_Points, float]:
    """Return all entries of a file and its end; raise ``InputError`` if one cannot be read."""
    kind = format_of(file)
    form = _FORMATS[kind]
    rows = _Rows(file.text)
    try:
        points, end_s = form.read(file, rows)
        if not points:
            raise ValueError("has no entry")
        _check_times(points, end_s)
    except InputError:
        raise
    except (
        *(ValueError, KeyError, TypeError, IndexError, AttributeError),
        *(OverflowError, RecursionError),
    ) as error:
        place = f"{file.name}: line {rows.line}" if rows.line else file.name
        what = f"could not be read as {kind}: {error}"
        raise InputError(Problem(place, what, form.cure)) from None
    for number, (one, two) in enumerate(pairwise(points), 1):
        if two[0] < one[0]:
            what = "is earlier than the line before: the log goes back in time"
            place = f"{file.name}: line {rows.lines[number]}"
            raise InputError(Problem(place, what, "sort its lines by time"))
    return points, end_s


def assumed_of(file: LogFile, series: Series) -> str:
    """Return what is assumed because the file does not say it; empty: nothing."""
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


def format_of(file: LogFile) -> str:
    """Recognise the format by the first line; sailord's by any line."""
    text = file.text.lstrip()
    if not text:
        raise InputError(Problem(file.name, "is empty", "give a log that has lines"))
    if is_sailord_log(text):
        return "sailord"
    first = text.partition("\n")[0].strip()
    if first.startswith("[") and '"nodes"' in first:
        return "parcae"
    if first.startswith("{"):
        if _TRACE.search(text):
            what = "is a trace already"
            raise InputError(Problem(file.name, what, "give it to `sailorctl replay` as it is"))
        return "skypilot"
    fields = next(iter(_Rows(text)), [])
    if not first.startswith("["):
        if len(fields) == 3:
            return "bamboo-events" if fields[1] in ("add", "remove") else "bamboo-counts"
        if len(fields) == 2:
            return "dated-counts" if ":" in fields[0] else "counts"
    what = f'begins with "{first[:40]}", which no known format does'
    known = " or ".join(f"`{form.example}`" for form in _FORMATS.values())
    raise InputError(Problem(file.name, what, f"give a log of lines like {known}"))


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
_TRACE = re.compile(r'"(points|changes|event)"\s*:')
_Point = tuple[float, Counts, NodesByKind]
_Points = list[_Point]


def _count_from_zero(points: _Points) -> Iterator[_Point]:
    """Yield the last entry of each moment if it changes something; times begin at 0."""
    start_s = points[0][0]
    before: tuple[Counts, NodesByKind] | None = None
    for number, (at_s, counts, nodes) in enumerate(points):
        follows = number + 1 < len(points) and points[number + 1][0] == at_s
        if not follows and (counts, nodes) != before:
            yield at_s - start_s, counts, nodes
            before = counts, nodes


class _Rows:
    """The values of a log's lines, without its heading; remembers which line was read last."""

    def __init__(self, text: str) -> None:
        lines = enumerate(map(str.strip, text.splitlines()), 1)
        self._left = [(number, line) for number, line in lines if line]
        if self._left and not any(map(_is_number, self._left[0][1].split(","))):
            del self._left[0]
        self.lines = [number for number, _ in self._left]
        self.line: int | None = None

    def __iter__(self) -> Iterator[list[str]]:
        """Yield the values of each line, which are between commas."""
        for line in self.texts():
            yield [part.strip() for part in line.split(",")]

    def of(self, names: str) -> Iterator[list[str]]:
        """Yield the values of each line, which must be as many as the names."""
        for values in self:
            if len(values) != len(names.split(",")):
                raise ValueError(f"has {len(values)} values, instead of {names}")
            yield values

    def texts(self) -> Iterator[str]:
        """Yield each line as it is."""
        for number, line in self._left:
            self.line = number
            yield line
        self.line = None


def _is_number(text: str) -> bool:
    """Whether a text is a number, a date or a time, right or wrong."""
    return text.strip().lstrip("[+-.")[:1].isdigit()


def _time(text: str) -> float:
    """Return a time without a unit."""
    try:
        time = float(text)
    except ValueError:
        time = nan
    if not time >= 0:
        raise ValueError(f'"{text}" is not a time, a number from 0')
    return time


def _date(text: str) -> datetime:
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f'"{text}" is not a date and a time') from None
    return date.replace(tzinfo=UTC) if date.tzinfo is None else date


def _convert_to_seconds(points: _Points, file: LogFile) -> _Points:
    """Return the points of a log that gives times without their unit."""
    times = [at for at, _, _ in points]
    as_ms_s = (times[-1] - times[0]) * UNITS["ms"]
    if file.unit is None and 0 < as_ms_s < SURE_S and any(at % 1000 for at in times):
        what = f"has times from {times[0]:g} to {times[-1]:g}; in ms that would be {as_ms_s:.3g} s"
        cure = f"say their unit with --unit ({', '.join(UNITS)})"
        raise InputError(Problem(file.name, what, cure))
    each_s = UNITS[file.unit or "ms"]
    return [(round(at * each_s, 6), counts, nodes) for at, counts, nodes in points]


def _bamboo_events(file: LogFile, rows: _Rows) -> tuple[_Points, float]:
    up: set[str] = set()
    points: _Points = []
    for at, what, node in rows.of("TIME,add|remove,NODE"):
        if what == "add":
            up.add(node)
        elif what != "remove":
            raise ValueError(f'"{what}" is neither add nor remove')
        elif node not in up:
            raise ValueError(f'"{node}" is removed, and was not added')
        else:
            up.remove(node)
        points.append(_point_of(_time(at), up, file))
    points = _convert_to_seconds(points, file)
    return points, points[-1][0] + _step_s(points)


def _point_of(at_s: float, up: set[str], file: LogFile) -> _Point:
    nodes = tuple(sorted(up))
    return at_s, {file.pool: len(nodes) * file.gpus_per_node}, {file.pool: nodes}


def _step_s(points: _Points) -> float:
    """The interval of the log: the shortest between two entries.

    Its last entry holds for as long.
    """
    times = sorted({point[0] for point in points})
    return min((two - one for one, two in pairwise(times)), default=0.0)


def _bamboo_counts(file: LogFile, rows: _Rows) -> tuple[_Points, float]:
    """A published log has entries for the minutes ahead; a later line corrects them."""
    points: _Points = []
    first = 0  # Of the latest entries with the same count.
    for day, time, count in rows.of("DATE,TIME,NODES"):
        at = _date(f"{day}T{time}").timestamp()
        counts = {file.pool: whole_number(count) * file.gpus_per_node}
        if points and at >= points[first][0]:
            for number in range(first, len(points)):
                points[number] = (min(at, points[number][0]), *points[number][1:])
        if points and counts != points[-1][1]:
            first = len(points)
        points.append((at, counts, {}))
    return points, points[-1][0]


def _dated_counts(file: LogFile, rows: _Rows) -> tuple[_Points, float]:
    points: _Points = [
        (_date(at).timestamp(), {file.pool: whole_number(count) * file.gpus_per_node}, {})
        for at, count in rows.of("DATE TIME,NODES")
    ]
    return points, points[-1][0] + _step_s(points)


def _counts(file: LogFile, rows: _Rows) -> tuple[_Points, float]:
    points: _Points = [
        (_time(at), {file.pool: whole_number(count) * file.gpus_per_node}, {})
        for at, count in rows.of("TIME,NODES")
    ]
    points = _convert_to_seconds(points, file)
    return points, points[-1][0] + _step_s(points)


def _parcae(file: LogFile, rows: _Rows) -> tuple[_Points, float]:
    up: set[str] = set()
    points: _Points = []
    lasts = 0.0
    for line in rows.texts():
        entry = json.loads(line)
        try:
            at, what, about = entry
            names, lasts = about["nodes"], float(about["duration"])
        except (ValueError, KeyError, TypeError):
            raise ValueError("has not all of the values") from None
        if what == "add":
            up.update(names)
        elif what == "remove":
            up.difference_update(names)
        points.append(_point_of(_time(at), up, file))
    points = _convert_to_seconds(points, file)
    return points, points[-1][0] + round(lasts * UNITS[file.unit or "ms"], 6)


def _skypilot(file: LogFile, _: _Rows) -> tuple[_Points, float]:
    document = json.loads(file.text)
    try:
        gap_s, data = float(document["metadata"]["gap_seconds"]), list(document["data"])
    except (ValueError, KeyError, TypeError):
        raise ValueError("it has no metadata.gap_seconds, or no list data") from None
    if not 0 < gap_s < TIMES_END_S:
        raise ValueError(f"metadata.gap_seconds is {gap_s:g}, not a number of seconds above 0")
    counts = [whole_number(count) * file.gpus_per_node for count in data]
    points: _Points = [
        (number * gap_s, {file.pool: gpus}, {}) for number, gpus in enumerate(counts)
    ]
    return points, len(counts) * gap_s


def _sailord(file: LogFile, _: _Rows) -> tuple[_Points, float]:
    points = _read_own_points([own_lines(file)])
    return points, points[-1][0]


def _read_own_points(logs: Iterable[Sequence[LogLine]]) -> _Points:
    return [(at_s, counts, {}) for at_s, counts in counts_over_time(logs)]


@dataclass(frozen=True, slots=True)
class _Format:
    read: Callable[[LogFile, _Rows], tuple[_Points, float]]
    example: str
    """A line of it."""

    @property
    def cure(self) -> str:
        return f"mend it, or leave it out; this format looks like `{self.example}`"


_WITHOUT_UNIT = ("bamboo-events", "counts", "parcae")
_FORMATS: Mapping[str, _Format] = {
    "bamboo-events": _Format(_bamboo_events, "60000,add,node-1"),
    "bamboo-counts": _Format(_bamboo_counts, "2021-12-31, 13:30:00, 16"),
    "dated-counts": _Format(_dated_counts, "2021-12-31 13:30:00,16"),
    "counts": _Format(_counts, "60000,16"),
    "parcae": _Format(_parcae, '[60000, "add", {"nodes": ["node-1"], "duration": 60000}]'),
    "skypilot": _Format(_skypilot, '{"metadata": {"gap_seconds": 300}, "data": [0, 16]}'),
    "sailord": _Format(_sailord, '{"at": 1767225600.5, "gpus": {"V100-16@us-east-1c": 16}}'),
}
