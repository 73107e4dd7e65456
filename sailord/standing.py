"""Questions that the controller's rules ask of what is known; each has one answer and no effect."""

from __future__ import annotations

from agents.protocol import GenerationRecord, Point, Restore
from sailord.changes import Change, broken_members, usable
from sailord.model import Active, Node, Planning, Proposal, State, Waiting
from sailord.recover import restore_point


def is_alive(state: State, active: Active) -> bool:
    """The generation can go on: it is not closed, and every member is there and sound."""
    generation = active.generation
    if generation is None or generation.state == "closed" or isinstance(active.phase, Waiting):
        return False
    if isinstance(active.phase, Planning) and isinstance(active.phase.before, Waiting):
        return False
    return not broken_members(state, generation)


def is_due(state: State, active: Active, change: Change | None) -> bool:
    """Say whether the change may be asked about now, and is not the question just refused."""
    if change is None or state.now < change.due or state.now < active.not_before:
        return False
    is_same_question = active.is_refused and active.considered == frozenset(usable(state, active))
    return not is_same_question or state.now >= active.considered_at + state.options.reconsider_s


def is_running_plan(active: Active, proposal: Proposal) -> bool:
    """Say whether the proposal is what runs already."""
    last = active.generation
    assert last is not None
    same = last.plan == proposal.plan and set(last.members) == set(proposal.members)
    return same and last.state == "open"


def is_too_late_to_stop(state: State, active: Active, proposal: Proposal) -> bool:
    """A member goes before one more step would end: its last snapshot is what counts."""
    assert active.generation is not None
    leaving = [
        node.record.leaves_at
        for id_ in active.generation.members
        if (node := state.nodes.get(id_)) is not None and node.leaving_since is not None
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
        and node.report.generation == generation.number
        and node.report.taking in taking
        for id_ in generation.members
    )


def is_informed(state: State, active: Active) -> bool:
    """Say whether all who may hold snapshots were heard, or had their time to speak.

    A leader that has just come knows nothing yet of what stands in the nodes' memory; and a node
    that lost its lease may be cut off from the store alone.
    """
    if active.generation is None:
        return True
    members = (state.nodes.get(id_) for id_ in active.generation.members)
    return all(node is None or node.is_lost or _speaks(node) for node in members)


def _speaks(node: Node) -> bool:
    """Its agent reports, even if it is not in the store."""
    is_there = node.absent_since is None or node.heard_at > node.absent_since
    return node.report is not None and is_there


def restore_now(state: State, active: Active) -> Restore:
    """Choose the restore point from what agents report of their snapshots."""
    reports = [
        node.report
        for _, node in sorted(state.nodes.items())
        if node.report is not None and not node.is_lost and _speaks(node)
    ]
    return restore_point(
        (sealed for report in reports for sealed in report.sealed),
        layers=active.job.layers,
        atoms=active.job.atoms,
        last=active.generation,
        durable=state.durables.get(active.job.id),
    )
