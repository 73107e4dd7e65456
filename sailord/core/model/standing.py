"""A node's standing: one state, from its lease and from what its agent answers.

    standing       lease_seen    lease_ended   probe_failed   reported      given_up
    Present        Present       Absent        Unreachable    Present       Lost
    Unreachable    Unreachable   Silent        Unreachable    Present       Lost
    Absent         Present       Absent        Silent         Absent        Lost
    Silent         Present       Silent        Silent         Absent        Lost
    Lost           Lost          Lost          Lost           Present       Lost

An unreachable node whose lease is seen with another address (``has_moved``) is Present: it was not
probed there yet.

A lease proves that the agent reaches the store, and an answer that it reaches the leader; a node
may have either without the other. Whether a node is draining, cordoned or a straggler is known
apart (see ``Node``): it keeps that while its lease comes and goes. A test compares the table with
the code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Present:
    """It has a lease, and no sign of trouble."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """It has a lease, but its agent left a probe unanswered."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Its lease has ended."""

    since: float


@dataclass(frozen=True, slots=True)
class Silent:
    """Its lease has ended, and its agent left a probe unanswered."""

    since: float
    """The end of its lease."""


@dataclass(frozen=True, slots=True)
class Lost:
    """It was given up; it is known as such while it has a lease or a generation names it."""

    at: float
    why: str
    absent_since: float | None
    """The end of its lease; ``None``: it still has one."""


Standing = Present | Unreachable | Absent | Silent | Lost
PRESENT = Present()


def lease_seen(standing: Standing, *, has_moved: bool = False) -> Standing:
    """It has a lease; at another address than before it has not been probed yet."""
    match standing:
        case Absent() | Silent():
            return Present()
        case Unreachable() if has_moved:
            return Present()
        case Lost():
            return replace(standing, absent_since=None)
        case _:
            return standing


def lease_ended(standing: Standing, at: float) -> Standing:
    """It has no lease."""
    match standing:
        case Present():
            return Absent(at)
        case Unreachable():
            return Silent(at)
        case Lost(absent_since=None):
            return replace(standing, absent_since=at)
        case _:
            return standing


def probe_failed(standing: Standing) -> Standing:
    """Its agent left a probe unanswered."""
    match standing:
        case Present():
            return Unreachable()
        case Absent():
            return Silent(standing.since)
        case _:
            return standing


def reported(standing: Standing) -> Standing:
    """Its agent reported; a node that was given up by mistake is back."""
    match standing:
        case Unreachable():
            return Present()
        case Silent():
            return Absent(standing.since)
        case Lost():
            since = standing.absent_since
            return Present() if since is None else Absent(since)
        case _:
            return standing


def given_up(standing: Standing, at: float, why: str) -> Standing:
    """It counts as lost until it reports again."""
    match standing:
        case Lost():
            return standing
        case Absent() | Silent():
            return Lost(at, why, standing.since)
        case _:
            return Lost(at, why, None)
