"""Operators' orders about the active job, carried out as soon as its phase allows.

Orders about a node (drain, cordon, preempt) are applied in ``learn``; ``replan_triggers`` reacts.
"""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import Order
from sailord.core.model.commands import Command, Note, SettleOrder
from sailord.core.model.phases import Held, Stopping, Waiting
from sailord.core.model.rule import PASS, RuleAnswer, Step, write_job
from sailord.core.model.state import Active, Attempts, State
from sailord.core.queries.active_job import is_alive, is_writing
from sailord.core.queries.job_cost import over_budget
from sailord.core.queries.replan_triggers import next_order
from sailord.core.rules.transitions import close, enter, stop, without


def follow_order(state: State, active: Active) -> RuleAnswer:
    """Carry out the next order."""
    order = next_order(active)
    if order is None or is_writing(active):
        return PASS
    reason = order.reason or f"{order.kind} was ordered"
    match order.kind:
        case "cancel":
            return close(state, active, "cancelled", reason)
        case "pause" if isinstance(active.phase, Stopping) and active.phase.then == "paused":
            return PASS
        case "pause" if is_alive(state, active):
            return stop(state, active, "paused", reason)
        case "pause":
            return close(state, active, "paused", reason)
        case "rollback" if isinstance(active.phase, Held) and over_budget(state):
            said = Note(f"no rollback: {over_budget(state)}", active.job)
            return _settled(state, active, order, said)
        case "resume" | "rollback" if isinstance(active.phase, Held):
            job = replace(state.job, state="running", reason=reason)
            again = replace(
                active,
                attempts=Attempts(not_before=state.now),
                asked=replace(active.asked, nodes=frozenset(), is_refused=False),
                checkpointing=replace(active.checkpointing, check=None),
                may_start_over=order.kind == "resume",
            )
            settle: tuple[Command, ...] = ()
            if order.kind == "resume":
                again, settle = without(again, order), (SettleOrder(order.id),)
            state, written = write_job(replace(state, active=again), job)
            return enter(state, Waiting(reason, state.now), *written, *settle)
        case "replan" if isinstance(active.phase, Held):
            return _settled(state, active, order)  # Resuming it asks for a new plan.
        case "replan" | "rollback":
            return PASS  # A trigger of a new plan: see ``replan_triggers``.
        case _:  # A resume of a job that goes on.
            return _settled(state, active, order)


def _settled(state: State, active: Active, order: Order, *said: Note) -> Step:
    return Step(replace(state, active=without(active, order)), (SettleOrder(order.id), *said))
