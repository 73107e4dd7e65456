"""Reads trace files: Sailor's events of added and lost GPUs, and published counts over time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from simulator.cluster.cluster import Cluster, Pool
from simulator.documents.fields import (
    InvalidValue,
    Table,
    open_table,
    valid_text,
    valid_timestamp,
)
from simulator.documents.files import Document, load_document, read_bytes
from simulator.documents.problems import InputError, Problem, Problems, nearest
from simulator.traces.named_nodes import Flaw, NamedNodes
from simulator.traces.published import LogFile, format_of, read_points
from simulator.traces.trace import GpuCounts, NodeNames, Trace, trace_of


class TracePoint(NamedTuple):
    """What is up from a moment on."""

    at_s: float
    gpus: GpuCounts
    nodes: NodeNames


Points = list[TracePoint]

GPUS_MAX = 10**7
COLLECTIONS = ("availability", "planner_experiments")
"""Keys under which a file may hold several named traces."""
ABOUT_KEYS = ("description", "source", "units", "conventions", "timestamp_of_zero")
"""Keys of published files that name their origin; they are ignored."""
COUNT_KEYS = ("gpus", "gpus_change", "machines", "machines_change")


@dataclass(frozen=True, slots=True)
class TraceChoice:
    """Which trace of a file to read, and how it applies to the cluster."""

    name: str | None = None
    pool: str | None = None
    """``<gpu>@<zone>``: the pool of points that name no GPU kind."""
    until_s: float | None = None
    """The end of the trace, no later than the file's; counts from ``from_s``."""
    from_s: float = 0.0
    """Seconds of the file at which the trace begins."""


def load_trace(path: Path, cluster: Cluster, choice: TraceChoice | None = None) -> Trace:
    """Read a trace; pools that it does not name stay as in the cluster."""
    try:
        document = load_document(path, flaws_raise=False)
    except InputError:
        _refuse_log(path)
        raise
    if "event" not in document.data and "points" not in document.data:
        _refuse_log(path)
    return trace_from_document(document, cluster, choice or TraceChoice())


def _refuse_log(path: Path) -> None:
    """Name the cure where a published log is given for a trace."""
    try:
        text = read_bytes(path, name=path.name).decode("utf-8-sig")
        log = LogFile(path.name, text, "", 1, unit="ms")
        read_points(log)
    except ValueError:
        return
    what = f"is a log ({format_of(log)}), not a trace"
    raise InputError(Problem(path.name, what, "make one of it with `sailorctl trace import`"))


def trace_from_document(document: Document, cluster: Cluster, choice: TraceChoice) -> Trace:
    """Read a trace of any format."""
    problems = Problems()
    top = open_table(document, problems)
    table = _choose_table(top, choice, problems)
    reader = _TraceReader(table, cluster, choice, problems)
    if "event" in table:
        points, end_s = reader.events()
    elif "points" in table or "changes" in table:
        points, end_s = reader.points()
    else:
        cure = "give [[event]] with time_s and gpus; docs/formats.md, Trace, shows all formats"
        problems.add(table.place or document.name, "has no event and no point", cure)
        points, end_s = [], None
    problems.raise_if_any()
    assert end_s is not None
    name = table.text("name") or choice.name or Path(document.name).stem
    _check_window(choice, reader.said_end_s, points[-1].at_s)
    sizes = [pool.gpus_per_machine for pool in cluster.pools]
    # Computed for the whole file, since machines may boot or have their notice at either end of the
    # replay.
    usable = usable_points(points, sizes, boot_s=reader.boot_s, notice_s=reader.notice_s)
    if choice.from_s:
        before = [point for point in usable if point.at_s <= choice.from_s][-1:]
        after = [point for point in usable if point.at_s > choice.from_s]
        usable = [
            point._replace(at_s=max(0.0, point.at_s - choice.from_s)) for point in (*before, *after)
        ]
        if choice.until_s is None:
            end_s -= choice.from_s
    usable = [point for point in usable if point.at_s < end_s]
    names = [point.nodes for point in usable]
    trace = trace_of(name, iter([(point.at_s, point.gpus) for point in usable]), end_s, names)
    return replace(trace, notice_s=reader.notice_s, starts_at=reader.starts_at)


def _check_window(choice: TraceChoice, said_end_s: float | None, last_s: float) -> None:
    """Refuse to begin or end where the file says nothing of the GPUs."""
    from_s, until_s = choice.from_s, choice.until_s
    end_s = last_s if said_end_s is None else said_end_s
    if from_s and from_s >= end_s:
        what = f"is {from_s:g}, and the trace ends at {end_s:g}"
        raise InputError(Problem("--from", what, "begin earlier"))
    if until_s is not None and said_end_s is not None and from_s + until_s > said_end_s:
        what = f"is {until_s:g}, and the trace ends {said_end_s - from_s:g} s after the beginning"
        raise InputError(Problem("--until", what, "end earlier, or raise end_s in the trace"))


def usable_points(
    points: Points, sizes: Sequence[int], *, boot_s: float, notice_s: float
) -> Points:
    """Return the GPUs that a plan may take: they have booted, and no loss is announced for them."""
    if not boot_s and not notice_s:
        return points
    booted = [point.at_s + boot_s for point in points]
    announced = [max(0.0, point.at_s - notice_s) for point in points]
    found: Points = []
    for now_s in sorted({0.0, *booted, *announced}):
        # At the start, the first GPUs count as booted.
        first = max(0, bisect_right(booted, now_s) - 1)
        last = bisect_right(announced, now_s)
        window = points[first:last]
        nodes = tuple(map(_find_in_all, zip(*(point.nodes for point in window), strict=True)))
        least = tuple(map(min, zip(*(point.gpus for point in window), strict=True)))
        gpus = tuple(
            count if names is None else len(names) * size
            for count, names, size in zip(least, nodes, sizes, strict=True)
        )
        found.append(TracePoint(now_s, gpus, nodes))
    return found


def _find_in_all(names: Sequence[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    """The names that are in every list; ``None`` if a list is unknown."""
    known = [each for each in names if each is not None]
    if len(known) < len(names):
        return None
    return tuple(name for name in known[0] if all(name in other for other in known[1:]))


def _choose_table(top: Table, choice: TraceChoice, problems: Problems) -> Table:
    """Return the table of the chosen trace; a file may hold several by name."""
    if not any(key in top for key in COLLECTIONS):
        if choice.name is not None:
            problems.add(top.document.name, "holds only one trace", "leave --trace out")
            problems.raise_if_any()
        return top
    found: dict[str, Table] = {}
    for key in COLLECTIONS:
        group = top.section(key)
        for name in group.values:
            inner = group.table(name)
            if inner is not None:
                found[name] = inner
    problems.raise_if_any()
    if choice.name in found:
        return found[choice.name]
    names = ", ".join(sorted(found))
    if choice.name is None:
        what = f"holds {len(found)} traces"
        raise InputError(Problem(top.document.name, what, f"name one with --trace: {names}"))
    what = f'holds no trace "{choice.name}"'
    raise InputError(Problem(top.document.name, what, nearest(choice.name, found)))


class _TraceReader:
    """Reads one table into points and collects its mistakes."""

    def __init__(
        self, table: Table, cluster: Cluster, choice: TraceChoice, problems: Problems
    ) -> None:
        self.table, self.cluster, self.problems = table, cluster, problems
        self.only, self.until_s = choice.pool, choice.until_s
        self.beyond: dict[int, tuple[str, int]] = {}
        """By pool with more GPUs than the cluster has: where there are most, and how many."""
        self.before = tuple(pool.gpus for pool in cluster.pools)
        self.nodes = NamedNodes([pool.gpus_per_machine for pool in cluster.pools])
        self.last_s = 0.0
        self.said_end_s = table.number("end_s", above=0)
        self.boot_s = table.number("boot_s", default=0.0, least=0) or 0.0
        self.notice_s = table.number("notice_s", default=0.0, least=0) or 0.0
        self.starts_at = table.value("starts_at", valid_timestamp)

    def events(self) -> tuple[Points, float | None]:
        """Read Sailor's format: events change the availability of the cluster file."""
        table = self.table
        table.text("name")
        if "end_s" not in table and self.until_s is None:
            table.number("end_s", required=True)
        end_s = self.until_s or self.said_end_s
        points: Points = [TracePoint(0.0, self.before, self.nodes.up)]
        for event in table.tables("event", required=True):
            at_s = self._time(event)
            pool = self._pool_of(event, "gpu")
            count = self._count(event, pool, points[-1].gpus)
            names = self._names(event, pool)
            event.finish()
            if at_s is None or pool is None or count is None:
                continue
            if end_s is not None and self.until_s is None and at_s >= end_s:
                event.report("time_s", f"is not before end_s, {end_s:g}", "raise end_s")
            self._note_room(event.place, {pool: count})
            is_change = any(key in event for key in COUNT_KEYS if key.endswith("_change"))
            change = count - points[-1].gpus[pool] if is_change else None
            self._flaw(event.place, self.nodes.note_nodes(pool, names, count, change))
            gpus = list(points[-1].gpus)
            gpus[pool] = count
            points.append(TracePoint(at_s, tuple(gpus), self.nodes.up))
        self._check_room()
        table.finish()
        return points, end_s

    def points(self) -> tuple[Points, float | None]:
        """Read points, of one pool or of several, that hold until the next one."""
        table, key = self.table, "points" if "points" in self.table else "changes"
        rows: list[tuple[float, dict[int, int], NodeNames]] = []
        for point in table.tables(key, required=True):
            at_s, (counts, names) = self._time(point), self._read_listed(point)
            for pool, known in enumerate(self.nodes.up):
                if pool in counts or known is not None:
                    flaw = self.nodes.note_nodes(pool, names.get(pool), counts.get(pool, 0), None)
                    self._flaw(point.place, flaw)
            if not rows and at_s:
                point.report(
                    "time_s",
                    f"is {at_s:g}: the trace says nothing of the time before",
                    "give a point at 0",
                )
            self._note_room(point.place, counts)
            if at_s is not None:
                rows.append((at_s, counts, self.nodes.up))
        self._check_room()
        # A pool that any row lists has no GPUs in rows that do not list it.
        named = {pool for _, counts, _ in rows for pool in counts}
        points: Points = [
            TracePoint(
                at_s,
                tuple(counts.get(n, 0) if n in named else up for n, up in self._enumerate_before()),
                nodes,
            )
            for at_s, counts, nodes in rows
        ]
        end_s = self._end_s(points)
        table.keys_read.update(dict.fromkeys(("name", "points", "changes", *ABOUT_KEYS)))
        table.finish()
        return points, end_s

    def _note_room(self, place: str, counts: Mapping[int, int]) -> None:
        """Note counts of GPUs that the cluster's pool cannot have."""
        for number, count in counts.items():
            pool = self.cluster.pools[number]
            if count > max(pool.gpus + pool.obtainable_gpus, self.beyond.get(number, ("", 0))[1]):
                self.beyond[number] = place, count

    def _check_room(self) -> None:
        """Report for each pool the highest count that it cannot have."""
        for number, (place, count) in self.beyond.items():
            pool = self.cluster.pools[number]
            most = pool.gpus + pool.obtainable_gpus
            what = f"has {count} GPUs of {_name(pool)}, where the cluster has {most}"
            cure = "raise gpus, machines or obtainable of that [[pool]] in the cluster file"
            self.problems.add(place, what, cure)

    def _end_s(self, points: Points) -> float | None:
        """Return the end of the trace; without one, the last point has no duration."""
        end_s = self.until_s or self.said_end_s or (points[-1].at_s if points else None)
        if points and self.until_s is None and end_s is not None:
            place = self.table.place or self.table.document.name
            if end_s < points[-1].at_s:
                what = f"has a point at {points[-1].at_s:g}, after its end_s, {end_s:g}"
                self.problems.add(place, what, "raise end_s, or give --until SECONDS")
            elif end_s <= 0:
                what = "gives no end for its last point"
                self.problems.add(place, what, "give --until SECONDS, or end_s in the file")
        return end_s

    def _enumerate_before(self) -> Iterator[tuple[int, int]]:
        return enumerate(self.before)

    def _time(self, table: Table) -> float | None:
        at_s = table.number("time_s", least=0, required=True)
        if at_s is not None and at_s < self.last_s:
            what = f"is {at_s:g}, but follows {self.last_s:g}"
            table.report("time_s", what, "sort by time")
        self.last_s = max(self.last_s, at_s or 0.0)
        return at_s

    def _flaw(self, place: str, flaw: Flaw | None) -> None:
        if flaw is not None:
            self.problems.add(place, *flaw)

    def _names(self, table: Table, pool: int | None) -> tuple[str, ...] | None:
        """Return the nodes that an event or a point names."""
        if "nodes" not in table:
            return None
        names = table.value("nodes", _valid_names)
        if names is None and pool is not None:
            self.nodes.flawed.add(pool)
        return names

    def _read_listed(self, point: Table) -> tuple[dict[int, int], dict[int, tuple[str, ...]]]:
        """Return the GPUs by pool that a point lists, and the names of nodes."""
        counts: dict[int, int] = {}
        nodes: dict[int, tuple[str, ...]] = {}
        entries = point.tables("available") if "available" in point else iter((point,))
        for entry in entries:
            pool = self._pool_of(entry, "gpu_type" if "gpu_type" in entry else "gpu")
            count = entry.integer("gpus", least=0, most=GPUS_MAX, required=True)
            names = self._names(entry, pool)
            if entry is not point:
                entry.finish()
            if pool is not None and count is not None:
                counts[pool] = counts.get(pool, 0) + count
                if names is not None:
                    nodes[pool] = (*nodes.get(pool, ()), *names)
        point.finish()
        return counts, nodes

    def _count(self, event: Table, pool: int | None, gpus: GpuCounts) -> int | None:
        """Return the GPUs of the pool after an event."""
        given = [key for key in COUNT_KEYS if key in event]
        if len(given) != 1:
            what = "gives no count" if not given else f"gives {' and '.join(given)}"
            self.problems.add(event.place, what, f"give one of {', '.join(COUNT_KEYS)}")
            return None
        key = given[0]
        is_change = key.endswith("_change")
        count = event.integer(key, least=-GPUS_MAX if is_change else 0, most=GPUS_MAX)
        if pool is None or count is None:
            return None
        if key.startswith("machines"):
            count *= self.cluster.pools[pool].gpus_per_machine
        if is_change:
            count += gpus[pool]
        if count < 0:
            what = f"leaves {count} GPUs: only {gpus[pool]} were up before"
            event.report(key, what, f"remove at most {gpus[pool]}")
            return None
        return count

    def _pool_of(self, table: Table, gpu_key: str) -> int | None:
        """Return the pool that an event or point names."""
        zone, machine = table.text("zone"), table.text("machine")
        gpu = table.value(gpu_key, self._gpu)
        spot = table.flag("spot", default=False) if "spot" in table else None
        if any(key in table and read is None for key, read in ((gpu_key, gpu), ("zone", zone))):
            return None  # Already reported.
        found = [
            index
            for index, pool in enumerate(self.cluster.pools)
            if zone in (None, pool.zone)
            and machine in (None, pool.machine)
            and gpu in (None, pool.gpu)
            and spot in (None, pool.spot)
            and (zone or machine or gpu or self.only in (None, _name(pool)))
        ]
        if len(found) == 1:
            return found[0]
        contract = {True: "spot", False: "on demand", None: None}[spot]
        said = ", ".join(filter(None, (gpu, machine, zone, contract)))
        place = table.place or table.document.name
        known = sorted({_name(pool) for pool in self.cluster.pools})
        if found:
            what = f"matches {len(found)} pools" + (f" of {said}" if said else "")
            what += " in the cluster file"
            cure = f"choose one with --pool: {', '.join(known)}"
            if len({(self.cluster.pools[n].key, self.cluster.pools[n].spot) for n in found}) == 1:
                what += ", of machines with all and with fewer GPUs"
                cure = (
                    "leave gpus_left out of the cluster file, or give those machines pools of"
                    " their own, with gpu and gpus_per_machine"
                )
            elif said:
                cure = "add zone, machine, gpu or spot until only one matches"
                if spot is None and len({self.cluster.pools[index].spot for index in found}) > 1:
                    cure += "; `trace import --spot` adds spot"
        elif said:
            what = f"is about {said}, and the cluster file has no such pool"
            cure = f"add a [[pool]] there, or change this; {nearest(said, known)}"
        else:
            place, what = "--pool", f'is "{self.only}", and the cluster file has no such pool'
            cure = nearest(self.only or "", known)
        if all((p.what, p.cure) != (what, cure) for p in self.problems.found):
            self.problems.add(place, what, cure)
        return None

    def _gpu(self, value: object) -> str:
        try:
            return self.cluster.catalogue.gpu_name(valid_text(value))
        except InputError as error:
            problem = error.problems[0]
            raise InvalidValue(problem.what, problem.cure) from None


def _valid_names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise InvalidValue("is not a list", 'give a list of names, as ["a", "b"]')
    return tuple(map(valid_text, value))


def _name(pool: Pool) -> str:
    return f"{pool.gpu}@{pool.zone}"
