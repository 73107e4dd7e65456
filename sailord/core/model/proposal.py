"""The planner's proposal, as the controller knows it."""

from __future__ import annotations

from dataclasses import dataclass

from agents.protocol.records import ComputeTimes, NodeId, Peak


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan on real nodes, the planner's answer."""

    plan: str
    """The hash under which the plan is stored."""
    members: tuple[NodeId, ...]
    is_worth_it: bool
    """Changing to it gains more than the change costs; ignored where a change is forced."""
    why: str
    iteration_s: float = 1.0
    """Predicted seconds of an iteration; the time limits follow from it."""
    move_s: float = 0.0
    """Predicted seconds of the reconfiguration."""
    next_move_s: float | None = None
    """Predicted seconds of the next reconfiguration, from this plan; ``None``: unknown."""
    ask_again_s: float | None = None
    """If it is only too early, or the plan was found in a hurry: seconds until the planner should
    be asked again."""
    usd_per_hour: float | None = None
    """``None``: a price is not known."""
    busy: ComputeTimes | None = None
    peaks: tuple[Peak, ...] = ()
    """By rank."""
    worths: tuple[tuple[str, float], ...] = ()
    """By GPU kind, also of other nodes: the samples of this job that one GPU computes in a second,
    as predicted, relative to the fastest kind."""
    move_phases: tuple[tuple[str, float], ...] = ()
    """The parts of ``move_s``, under the names under which they are measured."""
    move_uncorrected: tuple[tuple[str, float], ...] = ()
    """The same, not corrected by earlier moves."""
    losses: float = 0.0
    """Observed losses that would have taken one of its members; older ones count less."""
    observed_s: float = 0.0
    """Seconds over which they were observed; older ones count less."""
    write_s: float = 0.0
    """Seconds in which its members write a checkpoint, by the size of the state."""
    plain_s: float | None = None
    """``iteration_s`` without corrections by running steps, as capacity is planned; ``None``: there
    are none."""
