"""Questions that the controller's rules ask of what is known; each has one answer and no effect."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import (
    Durable,
    GenerationRecord,
    NodeId,
    Point,
    Report,
    ReportReply,
    Restore,
    Sealed,
)
from sailord.core.nodes import Node
from sailord.core.phases import Closing, Opening, Stopping, Waiting
from sailord.core.proposal import Proposal
from sailord.core.replan_triggers import Change, broken_members, is_gone, order_at_hand, usable
from sailord.core.restore_point import failure_domains, release_point, restore_point
from sailord.core.standing import Unreachable
from sailord.core.state import Active, State

REPORTS_PER_S_MAX = 500.0
"""That all goes on is heard so often of all nodes together; what is news comes besides."""
REPORTS_EVERY_S_MIN = 0.2


def is_alive(state: State, active: Active) -> bool:
    """The generation can go on: it is not closed, and every member is there and sound."""
    generation = active.generation
    if generation is None or generation.state == "closed" or isinstance(active.phase, Waiting):
        return False
    return not broken_members(state, generation)


def is_writing(active: Active) -> bool:
    """Say whether a record of the generation is on its way into the store: one after the other."""
    match active.phase:
        case Opening() | Closing():
            return True
        case Stopping():
            return active.generation is not None and active.generation.state == "open"
        case _:
            return False


def is_explained(state: State, generation: GenerationRecord) -> bool:
    """Say whether a lost machine, or a broken device, explains that the generation cannot go on.

    It need not be a member: one from which state was to be fetched may be gone, too.
    """
    broken = broken_members(state, generation)
    reports = (node.report for id_ in broken if (node := state.nodes.get(id_)) is not None)
    peers = (peer for report in reports if report is not None for peer in report.broken_peers)
    involved = (state.nodes.get(id_) for id_ in (*broken, *peers))
    return any(is_gone(node) for node in involved)


def is_due(state: State, active: Active, change: Change | None) -> bool:
    """Say whether the change may be asked about now, and is not the question just refused."""
    if change is None or state.now < change.due or state.now < active.attempts.not_before:
        return False
    order = order_at_hand(active)
    if order is not None and order.kind == "replan":
        return True
    asked = active.asked
    is_same_question = asked.is_refused and asked.nodes == frozenset(usable(state, active))
    return not is_same_question or state.now >= asked.at + state.options.reconsider_s


def ask_again_in(state: State, active: Active, seconds: float | None) -> Active:
    """The question may come again earlier than usual: what it was too early for will be in time."""
    if seconds is None or seconds >= state.options.reconsider_s:
        return active
    at = state.now + seconds - state.options.reconsider_s
    return replace(active, asked=replace(active.asked, at=at))


def is_running_plan(active: Active, proposal: Proposal) -> bool:
    """Say whether the proposal is what runs already."""
    last = active.generation
    assert last is not None
    same = last.plan == proposal.plan and set(last.members) == set(proposal.members)
    return same and last.state == "open"


def goes_back(active: Active) -> bool:
    """An operator ordered to go back to an older checkpoint: what runs is to be left as it is."""
    order = order_at_hand(active)
    return order is not None and order.kind == "rollback"


def is_too_late_to_stop(state: State, active: Active, proposal: Proposal) -> bool:
    """A member goes before one more step would end: its last snapshot is what counts."""
    assert active.generation is not None
    leaving = [
        node.record.leaves_at
        for id_ in active.generation.members
        if (node := state.nodes.get(id_)) is not None and node.draining_since is not None
    ]
    needed = state.now + 1.5 * proposal.iteration_s
    return any(leaves_at is not None and leaves_at < needed for leaves_at in leaving)


def stopped_at(state: State, generation: GenerationRecord) -> Point | None:
    """The point that all members have sealed, once all of them are parked at it."""
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
    """Say whether every member takes part in the generation in one of these ways."""
    return all(
        (node := state.nodes.get(id_)) is not None
        and node.report is not None
        and node.report.speaks_of(generation)
        and node.report.taking in taking
        for id_ in generation.members
    )


def has_started(state: State, generation: GenerationRecord) -> bool:
    """Say whether every member trains.

    Each says so; or one does that has done a step, which proves it also of those that a new leader
    cannot hear.
    """
    reports = (node.report for id_ in generation.members if (node := state.nodes.get(id_)))
    has_stepped = any(
        report is not None
        and report.speaks_of(generation)
        and report.taking in {"running", "stopped"}
        and report.step > generation.restore.point.step
        for report in reports
    )
    return has_stepped or all_members(state, generation, "running", "stopped")


def is_informed(state: State, active: Active) -> bool:
    """Say whether all who may hold snapshots were heard, or had their time to speak.

    A leader that has just come knows nothing yet of what stands in the nodes' memory; and a node
    that lost its lease may be cut off from the store alone.
    """
    if active.generation is None:
        return True
    members = (state.nodes.get(id_) for id_ in active.generation.members)
    heard = all(n is None or n.is_lost or _speaks(n) or _is_mute(state, n) for n in members)
    # Copies stand with those as well that only stand by.
    return heard and not any(
        node.report is None and node.absent_since is None and not _is_mute(state, node)
        for node in state.nodes.values()
        if not node.is_lost
    )


def _is_mute(state: State, node: Node) -> bool:
    """It is there, and cannot be heard: it left a probe unanswered when its time to speak was over.

    A wall may stand between it and us, or its clock be far from ours.
    """
    is_over = state.now >= state.trusted_since(node)
    return isinstance(node.standing, Unreachable) and is_over


def _speaks(node: Node) -> bool:
    """Its agent reports, even if it is not in the store."""
    is_there = node.absent_since is None or node.heard_at > node.absent_since
    return node.report is not None and is_there


def in_memory(state: State, active: Active) -> tuple[tuple[NodeId, Sealed], ...]:
    """The job's snapshots in the memory of nodes that live."""
    return tuple(
        (id_, sealed)
        for id_, node in sorted(state.nodes.items())
        if node.report is not None and not node.is_lost and _speaks(node)
        if node.report.job in {None, active.job}
        for sealed in node.report.sealed
    )


def restore_now(state: State, active: Active) -> tuple[Restore, Durable | None]:
    """Choose the restore point, and the older checkpoint that then counts as the newest, if any."""
    durable = state.durables.get(active.job)
    lowers = None
    check = active.checkpointing.check
    if check is not None and check.of == durable and check.found not in {None, durable}:
        durable = lowers = check.found
    order = order_at_hand(active)
    if order is not None and order.durable is not None:
        return Restore(order.durable.point, "durable"), order.durable
    restore = restore_point(
        in_memory(state, active),
        layers=state.job.layers,
        atoms=state.job.atoms,
        last=active.generation,
        durable=durable,
    )
    return restore, lowers


def release_now(state: State) -> Point | None:
    """The snapshots of the active job before this one may be forgotten; ``None``: none of them."""
    active = state.active
    if active is None or active.generation is None or isinstance(active.phase, Opening):
        return None
    point = release_point(
        in_memory(state, active),
        layers=state.job.layers,
        atoms=state.job.atoms,
        record=active.generation,
        durable=state.durables.get(active.job),
        domains=failure_domains(_copy_zones(state, active), state.job.saving.survive),
    )
    if point is not None and active.checkpointing.securing is not None:
        point = min(point, active.checkpointing.securing.point)
    return point


def _copy_zones(state: State, active: Active) -> dict[NodeId, str]:
    """The zones of all nodes that hold copies, or could: members, and those that stand by.

    A member without a lease may be back in a moment; until it is lost, two copies are two.
    """
    members = frozenset(() if active.generation is None else active.generation.members)
    return {
        id_: node.record.zone
        for id_, node in state.nodes.items()
        if not node.is_lost
        if id_ in members or (node.absent_since is None and node.record.state == "ready")
    }


def answer_to(state: State, report: Report, release: Point | None) -> ReportReply:
    """What an agent may forget of the active job, and what it is to make durable now."""
    active = state.active
    every_s = max(REPORTS_EVERY_S_MIN, len(state.nodes) / REPORTS_PER_S_MAX)
    if active is None or report.job != active.job:
        return ReportReply(state.term, every_s=every_s)
    upload = None if active.checkpointing.securing is None else active.checkpointing.securing.point
    return ReportReply(state.term, release, upload, every_s)
