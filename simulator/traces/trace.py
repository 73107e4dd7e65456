"""An availability trace: how many GPUs of each pool are up over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from simulator.cluster.cluster import Cluster

GpuCounts = tuple[int, ...]
"""GPUs up in each pool, in the order of the cluster's pools."""
NodeNames = tuple[tuple[str, ...] | None, ...]
"""Names of the nodes up in each pool, if they are known; those up longest first."""
LostSlots = tuple[tuple[int, ...], ...]
"""Which GPUs of each pool are lost at a change, numbered from 0, the longest up first."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A span of time with constant availability."""

    start_s: float
    end_s: float
    gpus: GpuCounts
    nodes: NodeNames = ()

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Trace:
    """Intervals from 0 to the end without gaps; neighbours differ."""

    name: str
    intervals: tuple[Interval, ...]
    notice_s: float = 0.0
    """How long before a loss it is announced; the counts exclude GPUs whose loss is announced."""
    starts_at: str | None = None
    """The date and time of second 0, if it is known."""

    @property
    def end_s(self) -> float:
        return self.intervals[-1].end_s

    def until(self, end_s: float) -> Trace:
        """The trace up to a moment."""
        kept = [interval for interval in self.intervals if interval.start_s < end_s]
        kept[-1] = replace(kept[-1], end_s=min(kept[-1].end_s, end_s))
        return replace(self, intervals=tuple(kept))

    def distinct(self) -> dict[GpuCounts, float]:
        """Return every distinct availability with its total seconds."""
        found: dict[GpuCounts, float] = {}
        for interval in self.intervals:
            found[interval.gpus] = found.get(interval.gpus, 0.0) + interval.seconds
        return found

    def never_regained(self, lost: Sequence[LostSlots]) -> tuple[GpuCounts, ...]:
        """Return, per interval, how many of the GPUs of the start have been up ever since."""
        left = self.intervals[0].gpus
        found = []
        for interval, slots in zip(self.intervals, lost, strict=True):
            left = tuple(
                min(count - sum(slot < count for slot in gone), up)
                for count, gone, up in zip(left, slots, interval.gpus, strict=True)
            )
            found.append(left)
        return tuple(found)

    def named_losses(self, pool: int, size: int) -> list[tuple[int, ...] | None]:
        """Return, per interval, which GPUs of a pool its start took; ``None`` without names.

        The nodes of the pool have ``size`` GPUs.
        """
        nodes = [each.nodes[pool] if each.nodes else None for each in self.intervals]
        return [
            None
            if before is None or now is None
            else tuple(
                slot
                for number, name in enumerate(before)
                if name not in now
                for slot in range(number * size, (number + 1) * size)
            )
            for before, now in zip((nodes[0], *nodes), nodes, strict=False)
        ]


def trace_of(
    name: str,
    points: Iterator[tuple[float, GpuCounts]],
    end_s: float,
    names: Sequence[NodeNames] = (),
) -> Trace:
    """Build a trace from points in order of time; each holds until the next one.

    ``names`` has those of each point.
    """
    intervals: list[Interval] = []
    for number, (at_s, gpus) in enumerate(points):
        known = names[number] if names else ()
        nodes = known if any(each is not None for each in known) else ()
        if intervals:
            last = intervals.pop()
            if at_s > last.start_s:
                intervals.append(replace(last, end_s=at_s))
        if intervals:
            nodes = _sort_longest_first(intervals[-1].nodes, nodes)
        if intervals and (intervals[-1].gpus, intervals[-1].nodes) == (gpus, nodes):
            intervals[-1] = replace(intervals[-1], end_s=end_s)
        else:
            intervals.append(Interval(at_s, end_s, gpus, nodes))
    assert intervals, "the reader rejects traces without points"
    assert intervals[0].start_s == 0
    assert all(interval.seconds > 0 for interval in intervals)
    return Trace(name, tuple(intervals))


def _sort_longest_first(before: NodeNames, now: NodeNames) -> NodeNames:
    if not before or not now:
        return now
    return tuple(
        names
        if names is None or was is None
        else (*(each for each in was if each in names), *(e for e in names if e not in was))
        for was, names in zip(before, now, strict=True)
    )


def cluster_at(cluster: Cluster, gpus: GpuCounts) -> Cluster:
    """Return the cluster with these GPU counts in its pools."""
    pools = tuple(
        replace(pool, gpus=count) for pool, count in zip(cluster.pools, gpus, strict=True)
    )
    return replace(cluster, pools=pools)
