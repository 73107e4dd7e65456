"""Curves of time over message size from many measurements: robust, monotone, with a band."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sailord.network.core.model import SIZES_BYTES, CurveToMeasure, Measurement

LOW, HIGH = 0.05, 0.95


@dataclass(frozen=True, slots=True)
class FitPoint:
    """A message size, and how long it takes."""

    size_bytes: int
    seconds: float
    low_s: float
    """Nine of ten transfers take between this and ``high_s``."""
    high_s: float
    """The upper end of that band."""
    is_measured: bool
    """If not, it follows from the rate of the largest size that was."""


@dataclass(frozen=True, slots=True)
class FittedCurve:
    """The answer to a question."""

    question: CurveToMeasure
    round_trip_s: float
    points: tuple[FitPoint, ...]
    measurements: int
    node_pairs: int
    newest_at: float

    @property
    def bytes_per_s(self) -> float:
        """Return the rate that large messages approach, of all flows together."""
        last = [point for point in self.points if point.is_measured][-1]
        return self.question.flows / _seconds_per_byte(last, self.round_trip_s)


def fit_curves(good: Iterable[Measurement]) -> list[FittedCurve]:
    """Return one curve for each question that has an answer."""
    by_question: defaultdict[CurveToMeasure, list[Measurement]] = defaultdict(list)
    for each in good:
        if each.times:
            by_question[each.question].append(each)
    return [_fit(question, found) for question, found in sorted(by_question.items())]


def _fit(question: CurveToMeasure, found: Sequence[Measurement]) -> FittedCurve:
    by_pair: defaultdict[int, defaultdict[tuple[str, str], list[float]]]
    by_pair = defaultdict(lambda: defaultdict(list))
    for each in found:
        for entry in each.times:
            by_pair[entry.size_bytes][each.sender, each.receiver] += entry.seconds
    sizes = sorted(by_pair)
    # A pair of nodes that was measured more often counts no more than others.
    centers = [statistics.median(map(statistics.median, by_pair[s].values())) for s in sizes]
    weights = [float(sum(map(len, by_pair[size].values()))) for size in sizes]
    lows = [min(c, _quantile(by_pair[s], LOW)) for s, c in zip(sizes, centers, strict=True)]
    highs = [max(c, _quantile(by_pair[s], HIGH)) for s, c in zip(sizes, centers, strict=True)]
    seconds, low, high = (isotonic(values, weights) for values in (centers, lows, highs))
    points = [FitPoint(*each, True) for each in zip(sizes, seconds, low, high, strict=True)]
    round_trip_s = statistics.median(each.round_trip_s for each in found)
    return FittedCurve(
        question,
        round_trip_s,
        (*points, *_extend(points[-1], round_trip_s)),
        len(found),
        len({(each.sender, each.receiver) for each in found}),
        max(each.at for each in found),
    )


def _quantile(by_pair: Mapping[tuple[str, str], Sequence[float]], share: float) -> float:
    values = sorted(value for values in by_pair.values() for value in values)
    return values[round(share * (len(values) - 1))]


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the closest sequence (weighted least squares) that never falls."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (left, left_weight, count), (right, right_weight, more) = blocks[-2:]
            total = left_weight + right_weight
            blocks[-2:] = [
                ((left * left_weight + right * right_weight) / total, total, count + more)
            ]
    return [value for value, _, count in blocks for _ in range(count)]


def _seconds_per_byte(last: FitPoint, round_trip_s: float) -> float:
    """Return how long each further byte takes: as the largest message's, less its latency."""
    return max(last.seconds - round_trip_s / 2, last.seconds / 2) / last.size_bytes


def _extend(last: FitPoint, round_trip_s: float) -> list[FitPoint]:
    """Return the sizes that took too long to measure."""
    each_s = _seconds_per_byte(last, round_trip_s)
    found = []
    for size in SIZES_BYTES:
        if size > last.size_bytes:
            more_s = each_s * (size - last.size_bytes)
            wider = (last.seconds + more_s) / last.seconds
            times = (last.seconds + more_s, last.low_s * wider, last.high_s * wider)
            found.append(FitPoint(size, *times, is_measured=False))
    return found
