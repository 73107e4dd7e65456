"""What the planner proposes, as the controller knows it."""

from __future__ import annotations

from dataclasses import dataclass

from agents.protocol.records import Busy, NodeId, Peak


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan on real nodes, as the planner answered."""

    plan: str
    """The hash under which it is stored."""
    members: tuple[NodeId, ...]
    is_worth_it: bool
    """Moving to it gains more than the move costs; only asked where nothing forces a move."""
    why: str
    iteration_s: float = 1.0
    """Predicted: the ladder of deadlines stands on it."""
    move_s: float = 0.0
    """Predicted for the move, all its phases together."""
    ask_again_s: float | None = None
    """If it is only too early to move: when to ask again, from the answer on."""
    usd_per_hour: float | None = None
    """``None``: a price is not known."""
    busy: Busy | None = None
    peaks: tuple[Peak, ...] = ()
    """By rank."""
    move_phases: tuple[tuple[str, float], ...] = ()
    """What ``move_s`` is made of; the names are those under which it is then measured."""
