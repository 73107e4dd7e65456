"""Replicas of the weights that differ: what is known, and what was decided about it."""

from __future__ import annotations

from agents.protocol.records import GenerationRecord
from sailord.core.model.state import Active, State
from sailord.core.queries.replan_triggers import last_rollback


def agreed_at(state: State, generation: GenerationRecord) -> int | None:
    """Return the last step after which replicas agreed, if members report that they differ now."""
    reports = (state.nodes[id_].report for id_ in state.nodes.notable)
    told = (each.agreed_at for each in reports if each is not None and each.speaks_of(generation))
    return min((step for step in told if step is not None), default=None)


def id_of_rollback(generation: GenerationRecord) -> str:
    """Return the id of our own order to go back to a checkpoint from before replicas differed."""
    return f"differs-{generation.job}-{generation.number}"


def is_decided(state: State, active: Active, generation: GenerationRecord) -> bool:
    """Return whether the job goes back, by anybody's order, or goes on all the same."""
    known = id_of_rollback(generation) in state.known_orders
    return known or last_rollback(active) is not None


def last_right_step(state: State, active: Active) -> int | None:
    """Return the step after which nothing may become durable; ``None``: there is none."""
    generation = active.generation
    if generation is None:
        return None
    goes_on = is_decided(state, active, generation) and last_rollback(active) is None
    return None if goes_on else agreed_at(state, generation)
