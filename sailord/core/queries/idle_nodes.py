"""Which usable nodes the plan leaves idle, and when all nodes are planned for again."""

from __future__ import annotations

from agents.protocol.records import NodeId
from sailord.core.model.phases import Running, Starting
from sailord.core.model.state import State
from sailord.core.queries.active_job import due_at
from sailord.core.queries.replan_triggers import replan_trigger


def idle_nodes(state: State) -> dict[NodeId, str]:
    """Return why each node is idle that the running plan could use, and what happens next."""
    active = state.active
    if active is None or active.generation is None:
        return {}
    if not isinstance(active.phase, Running | Starting):
        return {}
    idle = [id_ for id_ in state.nodes.free if id_ not in active.generation.members]
    if not idle:
        return {}
    asked_for = () if active.question is None else active.question.nodes
    again = "once the present generation runs"
    if isinstance(active.phase, Running):
        trigger = replan_trigger(state, active)
        assert trigger is not None, "a running job always has a next replan"
        again = f"in {max(due_at(state, active, trigger) - state.now, 0.0):.0f} s"

    def why(id_: NodeId) -> str:
        if id_ in asked_for:
            return "not in the plan; a plan for it is being looked for now"
        is_new = id_ not in active.asked.nodes
        reason = "not planned for yet" if is_new else "the plan does without it"
        return f"{reason}; all nodes are planned for again {again}"

    return {id_: why(id_) for id_ in idle}
