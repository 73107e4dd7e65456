"""How long the restore point waits for survivors of a loss that still seal their state.

    loss -> survivors announce a seal -> the planner answers -> they have sealed -> restore point

A survivor says what it seals and how long that takes (``Report.sealing``). Without an announcement
nothing waits. A wait must not cost more than what it saves: the steps since the last snapshot.
"""

from __future__ import annotations

from agents.protocol.records import SEAL_SLACK, GenerationRecord, Sealing
from sailord.core.model.nodes import Node
from sailord.core.model.standing import Absent, Present
from sailord.core.model.state import Active, State
from sailord.core.queries.replan_triggers import next_order
from sailord.core.queries.report_reply import report_every_s
from sailord.core.queries.timeouts import running_step_s

SEAL_LEAST_S = 1.0
"""Any announced seal is awaited at least this long: steps may be shorter than a message takes."""
REPORTS_MISSED = 3
"""A survivor that missed this many reports is not awaited: its agent may be dead."""


def awaits_seals(state: State, active: Active) -> bool:
    """Return whether a survivor of the generation still seals what is worth the wait."""
    generation, order = active.generation, next_order(active)
    if generation is None or (order is not None and order.durable is not None):
        return False  # A rollback begins from a checkpoint.
    return any(
        state.now < _awaited_until(state, active, generation, state.nodes[id_], report.sealing)
        for id_, report in state.reports_of(generation)
        if report.sealing is not None
    )


def _awaited_until(
    state: State, active: Active, generation: GenerationRecord, node: Node, sealing: Sealing
) -> float:
    since = node.workers.sealing_since
    if since is None or not _is_heard(state, node):
        return state.now
    redo_s = _redo_s(active, generation, sealing)
    if sealing.ready_in_s > max(redo_s, SEAL_LEAST_S):
        return since  # The steps are done again sooner.
    return since + max(min(SEAL_SLACK * sealing.ready_in_s, redo_s), SEAL_LEAST_S)


def _is_heard(state: State, node: Node) -> bool:
    """Return whether its agent reports; a lost or unreachable node is not awaited."""
    silent_s = REPORTS_MISSED * max(1.0, report_every_s(state))
    return isinstance(node.standing, Present | Absent) and state.now < node.heard_at + silent_s


def _redo_s(active: Active, generation: GenerationRecord, sealing: Sealing) -> float:
    """Return how long it takes to repeat the steps since the last snapshot.

    The announced step counts as at most one beyond the last reported one.
    """
    step = min(sealing.step, active.progress.step + 1)
    kept = (step - 1) // generation.memory_every * generation.memory_every
    return (step - max(kept, generation.restore.point.step)) * running_step_s(active)
