"""What is measured between which nodes, and within which limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agents.protocol.link_records import SizeTimes

SIZES_BYTES = tuple(1 << power for power in range(10, 27, 2))
"""1 KiB to 64 MiB."""
GENTLE_BYTES = 1 << 20
"""The largest message to or from a node that trains."""


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """Nodes that are alike for the network: one zone, one kind of GPU."""

    zone: str
    gpu: str


@dataclass(frozen=True, slots=True, order=True)
class CurveToMeasure:
    """A curve to measure."""

    sender: Site
    receiver: Site
    flows: int = 1
    both_ways: bool = False
    """The receiver sends as much at the same time."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that may be asked."""

    id: str
    site: Site
    gpus: int
    is_training: bool = False


@dataclass(frozen=True, slots=True)
class Measurement:
    """What an agent reported, as it is kept in the history."""

    at: float
    """Seconds since the epoch."""
    sender: str
    """The node that measured and reports."""
    receiver: str
    question: CurveToMeasure
    round_trip_s: float
    times: tuple[SizeTimes, ...]
    bytes_moved: int
    took_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A measurement that was refused, or ended before anything was measured."""

    at: float
    sender: str
    receiver: str
    question: CurveToMeasure
    why: str
    is_busy: bool
    """A node was busy; the link may be sound."""
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """Limits, ``[network]`` of ``sailord.toml``; those of the class are constants."""

    seconds_per_hour: float = 0.0
    """Of measurements on schedule; 0: only when ordered."""
    mbytes_per_hour: float = 2000.0
    """Of measurements on schedule, in 10^6 bytes."""
    fresh_hours: ClassVar[float] = 6.0
    """A measurement is repeated after this time."""
    pairs: ClassVar[int] = 3
    """Pairs of nodes that are measured for each two sites."""
    seconds_each: ClassVar[float] = 8.0
    """Of one measurement."""
    quiet_mbytes_per_s: ClassVar[float] = 1.0
    """A node that carries more is not measured now."""


@dataclass(frozen=True, slots=True)
class NextMeasurement:
    """The next measurement."""

    sender: str
    receiver: str
    question: CurveToMeasure
    sizes_bytes: tuple[int, ...]
    bytes_max: int
    look_s: float
    """How long the two nodes look whether they are quiet."""
