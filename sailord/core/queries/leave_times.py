"""When the job leaves its nodes that drain: at once, or in time before an announced end."""

from __future__ import annotations

from agents.protocol.records import NodeId
from planner.move_policy.leave_time import leave_at_s
from sailord.core.model.nodes import Node
from sailord.core.model.state import Active, State
from sailord.core.queries.timeouts import running_step_s


def leaves_from(active: Active, node: Node) -> float | None:
    """Return from when on the job leaves a member; ``None``: it does not drain.

    It leaves one whose end is announced when a move must begin so as to be over in time. It leaves
    one at once that an operator drains, that goes to another job, or whose end is not known.
    """
    since, ends_at, exclusion = node.drains_since, node.record.leaves_at, node.exclusion
    if since is None or ends_at is None or active.generation is None:
        return since
    move_s = active.generation.next_move_s
    if move_s is None or exclusion.is_drain_ordered or exclusion.has_open_end:
        return since
    if exclusion.yields_since is not None:
        return since
    return max(since, leave_at_s(ends_at, move_s, running_step_s(active)))


def left_later(state: State, active: Active) -> dict[NodeId, float]:
    """Return the draining members on which the job trains until it has to leave them, and when."""
    generation = active.generation
    if generation is None or generation.state == "closed":
        return {}
    members = state.nodes.notable.intersection(generation.members)
    draining = ((id_, state.nodes[id_]) for id_ in members)
    found = {id_: leaves_from(active, node) for id_, node in draining if not node.is_lost}
    return {id_: at for id_, at in sorted(found.items()) if at is not None and at > state.now}
