"""Curves of transfer time over message size, for different numbers of concurrent flows."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

_LATENCY_S = 20e-6
"""Lower bound for messages below the smallest measured size: a kernel launch and a hop."""
_PACKET_BYTES = 4096
"""A message of this size or less takes as long as a shorter one: it is latency and little else."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds that ``flows`` equal concurrent transfers take, by the size of each.

    Time is interpolated linearly between measured sizes. Interpolating bandwidth instead would
    make some larger messages faster than smaller ones. Messages shorter than any measured one take
    as long as that one, if it fits a packet.
    """

    flows: int
    sizes_bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    polynomial: tuple[float, float, float] | None = None
    """GB/s as a quadratic in log2(MB), unclamped; only the ``paper`` estimator uses it."""
    notes: tuple[str, ...] = ()
    is_tcp: bool = False
    """Whether the transfers are TCP connections, of which a ring may open several."""
    relative_error: float | None = None
    """Nine of ten transfers are within it; ``None``: the file has no band."""

    @property
    def has_packets(self) -> bool:
        """Whether its shortest message fits a packet, and so tells the latency."""
        return self.sizes_bytes[0] <= _PACKET_BYTES

    def __call__(self, bytes_each: float) -> float:
        """Return the seconds until every flow has carried ``bytes_each``."""
        sizes, seconds = self.sizes_bytes, self.seconds
        if bytes_each <= 0:
            return 0.0
        if bytes_each <= sizes[0]:
            if self.has_packets:
                return seconds[0]
            # Curves that begin with large messages say nothing of latency.
            return max(min(_LATENCY_S, seconds[0]), seconds[0] * bytes_each / sizes[0])
        if bytes_each >= sizes[-1]:
            return seconds[-1] * bytes_each / sizes[-1]
        right = bisect.bisect_left(sizes, bytes_each)
        share = (bytes_each - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])

    def polynomial_bytes_per_s(self, bytes_each: float) -> float:
        """Return the bandwidth of the raw polynomial, which may be zero or negative."""
        assert self.polynomial is not None
        x = math.log2(bytes_each / 1e6)
        square, linear, constant = self.polynomial
        return (square * x * x + linear * x + constant) * 1e9


def curve_from_bandwidths(
    flows: int,
    *,
    sizes_bytes: tuple[float, ...],
    bytes_per_s: tuple[float, ...],
    polynomial: tuple[float, float, float] | None = None,
    is_tcp: bool = False,
    relative_error: float | None = None,
) -> Curve:
    """Build a curve from aggregate bandwidths at growing sizes; its time never decreases."""
    seconds: list[float] = []
    for size, bandwidth in zip(sizes_bytes, bytes_per_s, strict=True):
        seconds.append(max([flows * size / bandwidth, *seconds[-1:]]))
    return Curve(
        flows,
        sizes_bytes,
        tuple(seconds),
        polynomial,
        is_tcp=is_tcp,
        relative_error=relative_error,
    )


def make_consistent(curves: Mapping[int, Curve]) -> dict[int, Curve]:
    """Correct the curves of one link so that they are consistent over concurrent flows.

    On any link, more flows carry at least as much in total as fewer flows, and a flow is not
    slower for sharing with fewer others. A measurement that violates this (a copied value, a
    misconfigured run) is replaced by the bound, with a note if it was off by more than 50 %.
    """
    counts = sorted(curves)
    fixed = dict(curves)
    for fewer, more in pairwise(counts):
        # Total bandwidth does not fall: seconds(more) <= seconds(fewer) * more / fewer.
        fixed[more] = _cap(
            fixed[more], fixed[fewer], more / fewer, f"{more} flows carried less than {fewer}"
        )
    for fewer, more in zip(reversed(counts[:-1]), reversed(counts[1:]), strict=True):
        fixed[fewer] = _cap(
            fixed[fewer], fixed[more], 1.0, f"{fewer} flows were slower than {more}"
        )
    return fixed


def _cap(curve: Curve, bound: Curve, factor: float, note: str) -> Curve:
    limits = [bound(size) * factor for size in curve.sizes_bytes]
    if all(own <= limit for own, limit in zip(curve.seconds, limits, strict=True)):
        return curve
    gross = any(own > 1.5 * limit for own, limit in zip(curve.seconds, limits, strict=True))
    return replace(
        curve,
        seconds=tuple(min(pair) for pair in zip(curve.seconds, limits, strict=True)),
        notes=(*curve.notes, note) if gross else curve.notes,
    )


def seconds_at_flows(curves: Mapping[int, Curve], *, flows: int, bytes_each: float) -> float:
    """Return the seconds for any number of concurrent flows, from the measured counts.

    Between measured counts, total bandwidth is that of the next smaller count, and no flow is
    slower than at the next larger count: the most conservative value that agrees with the
    measurements.
    """
    bounds = []
    if (fewer := max((count for count in curves if count <= flows), default=None)) is not None:
        bounds.append(curves[fewer](bytes_each) * flows / fewer)
    if (more := min((count for count in curves if count >= flows), default=None)) is not None:
        bounds.append(curves[more](bytes_each))
    return min(bounds)


def is_tcp(curves: Mapping[int, Curve]) -> bool:
    """Whether all curves of a link were measured over TCP connections."""
    return all(curve.is_tcp for curve in curves.values())
