"""Which nodes hold state that is needed; which draining nodes may stop, and which cannot drain."""

from __future__ import annotations

from agents.protocol.records import NodeId, Point, Report
from sailord.core.model.nodes import Node
from sailord.core.model.state import State
from sailord.core.queries.leave_times import left_later
from sailord.core.queries.replan_triggers import usable
from sailord.core.queries.restore_choice import ignores_probes, release_now


def drained(state: State) -> frozenset[NodeId]:
    """Return the draining nodes that are safe to stop."""
    leaving = [
        (id_, node)
        for id_ in state.nodes.notable
        if (node := state.nodes[id_]).is_draining and not node.is_lost
    ]
    if not leaving:
        return frozenset()
    release = release_now(state)
    return frozenset(id_ for id_, node in leaving if _is_free(state, id_, node, release))


def holders(state: State) -> frozenset[NodeId]:
    """Return the nodes whose memory the active job may need, or that have not reported yet."""
    active = state.active
    if active is None:
        return frozenset()
    release = release_now(state)

    def is_needed(node: Node) -> bool:
        if node.is_lost:
            return False
        if node.report is None:
            # It has not reported yet, and may hold a copy, unless it does not answer either.
            return not ignores_probes(state, node)
        return node.report.job in {None, active.job} and _has_unreleased(node.report, release)

    return frozenset(id_ for id_, node in state.nodes.items() if is_needed(node))


def stuck(state: State) -> frozenset[NodeId]:
    """Return the draining members without which there is no plan: their drain cannot end."""
    active = state.active
    generation = None if active is None else active.generation
    if active is None or generation is None or generation.state == "closed":
        return frozenset()
    asked = active.asked
    if not asked.is_refused or asked.nodes != frozenset(usable(state, active)):
        return frozenset()
    members = state.nodes.notable.intersection(generation.members).difference(
        left_later(state, active)
    )
    return frozenset(
        id_ for id_ in members if state.nodes[id_].is_draining and not state.nodes[id_].is_lost
    )


def _is_free(state: State, id_: NodeId, node: Node, release: Point | None) -> bool:
    if node.report is None or node.report.taking != "idle":
        return False
    generation = None if state.active is None else state.active.generation
    if generation is not None and generation.state != "closed" and id_ in generation.members:
        return False
    return not _holds_state(state, node.report, release)


def _holds_state(state: State, report: Report, release: Point | None) -> bool:
    """Whether a node's snapshots may be the last copy of a step that a job could restore."""
    active = state.active
    if not report.sealed:
        return False
    if active is not None and report.job in {None, active.job}:
        return _has_unreleased(report, release)
    job = None if report.job is None else state.jobs.get(report.job)
    if job is None or job.state in {"done", "cancelled"}:
        return False
    durable = state.durables.get(job.id)
    return durable is None or any(durable.point < each.point for each in report.sealed)


def _has_unreleased(report: Report, release: Point | None) -> bool:
    """Whether a node has snapshots of the active job that are not released.

    The released point may be the one from which the running generation began, so snapshots of later
    generations than the point's are not released either.
    """
    if release is None:
        return bool(report.sealed)
    end = release.generation, release.step
    return any((each.point.generation, each.point.step) >= end for each in report.sealed)
