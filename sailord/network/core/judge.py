"""Decides which measurements to use: leaves out impossible ones, and agents that report them."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sailord.network.core.model import SIZES_BYTES, Measurement, Site

TIMES_NIC_MAX = 1.25
"""Faster than the NIC by more than this factor is absurd."""
TIMES_PEERS = 10.0
"""More than this factor off what other nodes report is absurd."""
TIMES_SMALLER = 4.0
"""A message that is faster than a smaller one by more than this factor is absurd."""
PAUSE_S = 0.01
"""Times that differ by less than this tell of busy processors, not of a lie."""
ROUND_TRIP_S_MAX = 30.0
SECONDS_MIN, SECONDS_MAX = 1e-9, 3600.0
FLAGGED_MIN = 2
"""A node is a liar if at least this many of its reports, and more than half of them, are
flagged."""

OF_A_LIAR = "reported by a node most of whose reports are absurd"


@dataclass(frozen=True, slots=True)
class RejectedMeasurement:
    """A measurement that is not used."""

    measurement: Measurement
    why: str
    is_blamed: bool = True
    """It counts against the node that reports it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The measurements, sorted out."""

    good: tuple[Measurement, ...]
    flagged: tuple[RejectedMeasurement, ...]
    liars: frozenset[str]
    """Nodes whose reports are not used."""


def judge(
    measurements: Sequence[Measurement], nic_bytes_per_s: Callable[[Site], float | None]
) -> Verdict:
    """Sort out measurements; ``nic_bytes_per_s`` returns the rate of a site's nodes, if known."""
    suspected = _find_flagged(measurements, nic_bytes_per_s)
    liars = _liars(measurements, [each for each in suspected if each.is_blamed])
    # Without the liars, those whom only they contradict are believed.
    honest = [each for each in measurements if each.sender not in liars]
    flagged = _find_flagged(honest, nic_bytes_per_s)
    unused = {id(each.measurement) for each in flagged}
    reasons = {id(each.measurement): each for each in suspected}
    for each in measurements:
        if each.sender in liars:
            unused.add(id(each))
            flagged.append(reasons.get(id(each)) or RejectedMeasurement(each, OF_A_LIAR))
    good = tuple(each for each in measurements if id(each) not in unused)
    return Verdict(good, tuple(flagged), liars)


def _find_flagged(
    measurements: Sequence[Measurement], nic_bytes_per_s: Callable[[Site], float | None]
) -> list[RejectedMeasurement]:
    flagged: list[RejectedMeasurement] = []
    sane: list[Measurement] = []
    for each in measurements:
        why = _why_absurd(each, nic_bytes_per_s)
        if why:
            flagged.append(RejectedMeasurement(each, why))
        else:
            sane.append(each)
    return [*flagged, *_find_outliers(sane).values()]


def _why_absurd(each: Measurement, nic_bytes_per_s: Callable[[Site], float | None]) -> str:
    """Return what cannot be true of a single measurement."""
    if not 0 < each.round_trip_s <= ROUND_TRIP_S_MAX:
        return f"a round trip of {each.round_trip_s:g} s"
    sizes = [entry.size_bytes for entry in each.times]
    if sizes != sorted(set(sizes)) or not set(sizes) <= set(SIZES_BYTES):
        return "sizes that were not asked for"
    rates = (nic_bytes_per_s(each.question.sender), nic_bytes_per_s(each.question.receiver))
    nic = min((rate for rate in rates if rate is not None), default=math.inf)
    slowest_s = 0.0
    for entry in each.times:
        if not entry.seconds or min(entry.seconds) < SECONDS_MIN:
            return f"{entry.size_bytes} bytes in no time"
        if max(entry.seconds) > SECONDS_MAX:
            return f"{entry.size_bytes} bytes in {max(entry.seconds):g} s"
        rate = each.question.flows * entry.size_bytes / statistics.median(entry.seconds)
        if rate > TIMES_NIC_MAX * nic:
            return f"{rate / 1e9:.3g} GB/s over a NIC of {nic / 1e9:.3g} GB/s"
        least_s = min(entry.seconds)
        if least_s * TIMES_SMALLER < slowest_s - PAUSE_S:
            return f"{entry.size_bytes} bytes much faster than fewer"
        slowest_s = max(slowest_s, least_s)
    return ""


def _find_outliers(sane: Sequence[Measurement]) -> dict[int, RejectedMeasurement]:
    """Return the measurements that most other nodes contradict by an order of magnitude.

    Times are compared among those that answer the same question, round trips among those between
    the same two sites in either direction, since a round trip is the same from both ends.
    """
    odd: dict[int, RejectedMeasurement] = {}
    trips: defaultdict[frozenset[Site], dict[int, float]] = defaultdict(dict)
    sized: defaultdict[object, dict[int, float]] = defaultdict(dict)
    for index, each in enumerate(sane):
        trips[frozenset((each.question.sender, each.question.receiver))][index] = each.round_trip_s
        for entry in each.times:
            sized[each.question, entry.size_bytes][index] = min(entry.seconds)
    for values in (*trips.values(), *sized.values()):
        for index, value in values.items():
            others = _of_others(sane, index, values)
            far = [o for o in others if max(o, value) > TIMES_PEERS * min(o, value) + PAUSE_S]
            if not far or 2 * len(far) <= len(others):
                continue
            they = "another node reports" if len(others) == 1 else "other nodes report"
            why = f"{max(far[0], value) / min(far[0], value):.0f} times off what {they}"
            # Of two that contradict each other, either may be wrong.
            is_blamed = len(others) > 1
            if index not in odd or is_blamed:
                odd[index] = RejectedMeasurement(sane[index], why, is_blamed)
    return odd


def _of_others(sane: Sequence[Measurement], index: int, values: dict[int, float]) -> list[float]:
    """Return one value, the median, for each other node that reports."""
    by_node: defaultdict[str, list[float]] = defaultdict(list)
    for other, value in values.items():
        if sane[other].sender != sane[index].sender:
            by_node[sane[other].sender].append(value)
    return [statistics.median(each) for each in by_node.values()]


def _liars(
    measurements: Iterable[Measurement], flagged: Iterable[RejectedMeasurement]
) -> frozenset[str]:
    all_ = Counter(each.sender for each in measurements)
    bad = Counter(each.measurement.sender for each in flagged)
    return frozenset(
        node for node, count in bad.items() if count >= FLAGGED_MIN and 2 * count > all_[node]
    )
