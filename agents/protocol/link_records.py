"""Messages between sailord and agents for measurements of the network between two nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkOrder:
    """sailord's order to an agent: measure the way to a peer."""

    peer: str
    """The address of the peer's agent."""
    flows: int
    """Equal transfers at once, each on a connection of its own."""
    both_ways: bool
    """The peer sends as much at the same time."""
    sizes_bytes: tuple[int, ...]
    """The bytes of each transfer, in growing order."""
    bytes_max: int
    """The limit for all transfers of this measurement, both ways together."""
    seconds_max: float
    quiet_bytes_per_s: float
    """Nothing is measured if one of the two nodes has more traffic than this."""
    look_s: float = 0.25
    """How long the nodes watch their traffic before they measure."""
    name: str = ""
    """The peer's name; empty from a sailord of an older version."""


@dataclass(frozen=True, slots=True)
class ListenOrder:
    """An agent's question to a peer: listen for a measurement."""

    flows: int
    bytes_max: int
    seconds_max: float
    quiet_bytes_per_s: float
    look_s: float = 0.25


@dataclass(frozen=True, slots=True)
class Listening:
    """The peer's answer."""

    port: int = 0
    secret: bytes = b""
    """A connection must send it first."""
    busy: str = ""
    """Why it does not listen; empty: it does."""


@dataclass(frozen=True, slots=True)
class SizeTimes:
    """How long transfers of one size took."""

    size_bytes: int
    seconds: tuple[float, ...]
    """Until the last flow had arrived, without the way back of its receipt."""


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """The result of a measurement."""

    round_trip_s: float = 0.0
    """Of one byte and its receipt; the least of several."""
    times: tuple[SizeTimes, ...] = ()
    bytes_moved: int = 0
    busy: str = ""
    """Why nothing was measured, though the link may be sound: ask again later."""
    broken: str = ""
    """Why the measurement ended early; what was measured before stands."""
