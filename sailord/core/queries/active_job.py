"""Questions about the active job that several rules ask."""

from __future__ import annotations

from agents.protocol.records import GenerationRecord, Point
from sailord.core.model.phases import Closing, Opening, Starting, Stopping, Waiting
from sailord.core.model.proposal import Proposal
from sailord.core.model.state import Active, State
from sailord.core.queries.replan_triggers import (
    Trigger,
    broken_members,
    is_gone,
    is_last_resort,
    next_order,
    usable,
)


def is_alive(state: State, active: Active) -> bool:
    """Return whether the generation can go on: it is not closed, and no member is broken."""
    generation = active.generation
    if generation is None or generation.state == "closed" or isinstance(active.phase, Waiting):
        return False
    return not broken_members(state, generation)


def is_writing(active: Active) -> bool:
    """Return whether a generation record is being stored; only one may be at a time."""
    match active.phase:
        case Opening() | Closing():
            return True
        case Stopping():
            return active.generation is not None and active.generation.state == "open"
        case _:
            return False


def is_explained(state: State, generation: GenerationRecord) -> bool:
    """Return whether a lost node, a broken device or wrong bits explain the generation's failure.

    The node need not be a member: state may have been fetched from another one.
    """
    broken = broken_members(state, generation)
    reports = (node.report for id_ in broken if (node := state.nodes.get(id_)) is not None)
    named = (each for each in reports if each is not None)
    peers = (peer for each in named for peer in (*each.broken_peers, *each.contradicted))
    involved = (state.nodes.get(id_) for id_ in (*broken, *peers))
    return any(is_gone(node) for node in involved)


def is_due(state: State, active: Active, trigger: Trigger | None) -> bool:
    """Return whether the planner may be asked now."""
    return trigger is not None and state.now >= due_at(state, active, trigger)


def due_at(state: State, active: Active, trigger: Trigger) -> float:
    """Return when the planner may be asked; the same refused question waits ``reconsider_s``."""
    due = max(trigger.due, active.attempts.not_before)
    order, asked = next_order(active), active.asked
    if (order is not None and order.kind == "replan") or is_last_resort(state, active):
        return due
    is_same_question = asked.is_refused and asked.nodes == frozenset(usable(state, active))
    return max(due, asked.at + state.options.reconsider_s) if is_same_question else due


def is_running_plan(active: Active, proposal: Proposal) -> bool:
    """Return whether the proposed plan runs already."""
    last = active.generation
    assert last is not None
    same = last.plan == proposal.plan and set(last.members) == set(proposal.members)
    return same and last.state == "open"


def is_rolling_back(active: Active) -> bool:
    """Return whether a rollback was ordered: it abandons the generation without a stop."""
    order = next_order(active)
    return order is not None and order.kind == "rollback"


def is_too_late_to_stop(state: State, active: Active, proposal: Proposal) -> bool:
    """Return whether a draining member leaves within 1.5 steps, too soon for one more."""
    assert active.generation is not None
    leaving = [
        node.record.leaves_at
        for id_ in active.generation.members
        if (node := state.nodes.get(id_)) is not None and node.is_draining
    ]
    step_s = active.progress.step_s or proposal.iteration_s
    needed = state.now + 1.5 * step_s
    return any(leaves_at is not None and leaves_at < needed for leaves_at in leaving)


def is_joining(state: State, active: Active) -> bool:
    """Return whether a member has yet to join the generation; after a stop it never would."""
    generation = active.generation
    if generation is None or not isinstance(active.phase, Starting):
        return False
    heard = sum(1 for _ in state.reports_of(generation))
    return heard < len(generation.members)


def stopped_at(state: State, generation: GenerationRecord) -> Point | None:
    """Return the point at which all members are parked and sealed; ``None``: not yet."""
    if not all_members(state, generation, "stopped"):
        return None
    points = set()
    for id_ in generation.members:
        report = state.nodes[id_].report
        assert report is not None
        point = Point(report.step, generation.number)
        if all(sealed.point != point for sealed in report.sealed):
            return None
        points.add(point)
    return points.pop() if len(points) == 1 else None


def all_members(state: State, generation: GenerationRecord, *taking: str) -> bool:
    """Return whether every member reports one of these states for the generation."""
    return all(
        (node := state.nodes.get(id_)) is not None
        and node.report is not None
        and node.report.speaks_of(generation)
        and node.report.taking in taking
        for id_ in generation.members
    )


def has_started(state: State, generation: GenerationRecord) -> bool:
    """Return whether every member trains.

    Each reports it; or one has done a step, which takes all members, also those that a new leader
    cannot reach.
    """
    has_stepped = any(
        report.taking in {"running", "stopped"} and report.step > generation.restore.point.step
        for _, report in state.reports_of(generation)
    )
    return has_stepped or all_members(state, generation, "running", "stopped")
