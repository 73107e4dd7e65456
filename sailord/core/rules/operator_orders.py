"""Operators' orders about the active job, carried out as soon as its phase allows.

Orders about a node (drain, cordon, preempt) are applied in ``learn``; ``replan_triggers`` reacts.
"""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import Order
from sailord.core.model.commands import Command, Note, SettleOrder
from sailord.core.model.phases import Held, Running, Starting, Stopping, Waiting
from sailord.core.model.rule import PASS, WAIT, RuleAnswer, Step, write_job
from sailord.core.model.state import Active, Attempts, State
from sailord.core.queries.active_job import has_started, is_alive, is_writing
from sailord.core.queries.job_cost import over_budget
from sailord.core.queries.replan_triggers import last_steering_order, next_order
from sailord.core.queries.restore_choice import holders_reported, restore_now
from sailord.core.rules.checkpoint_rules import secure
from sailord.core.rules.transitions import close, enter, stop, without


def follow_order(state: State, active: Active) -> RuleAnswer:
    """Carry out the next order."""
    order = _next_possible(state, active)
    if order is None or is_writing(active):
        return PASS
    reason = order.reason or f"{order.kind} was ordered"
    match order.kind:
        case "cancel":
            return close(state, active, "cancelled", reason)
        case "pause":
            return _pause(state, active, order, reason)
        case "resume" | "rollback" if isinstance(active.phase, Held) and over_budget(state):
            said = Note(f"no {order.kind}: {over_budget(state)}", active.job)
            return _settle(state, active, order, said)
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
            return _settle(state, active, order)  # Resuming it asks for a new plan.
        case "replan" | "rollback":
            return PASS  # A trigger of a new plan: see ``replan_triggers``.
        case _:  # A resume of a job that goes on.
            return _settle(state, active, order)


def _next_possible(state: State, active: Active) -> Order | None:
    """Return the next order; a rollback that waits for a plan, or for a resume, is overtaken."""
    order = next_order(active)
    if order is None or order.kind != "rollback":
        return order
    match active.phase:
        case Held(tried=tried) if order.id in tried and (
            order.wrong_bits or not over_budget(state)
        ):
            given = (each for each in active.orders if each.id not in tried)
            return next((each for each in given if each.kind != "checkpoint"), None)
        case Waiting() if active.asked.is_refused and last_steering_order(active) == "pause":
            return next(each for each in active.orders if each.kind == "pause")
        case _:
            return order


def _pause(state: State, active: Active, order: Order, reason: str) -> RuleAnswer:
    """Stop at the end of a step, so that the last one can be made durable.

    Where nothing runs, the last steps may be in memory alone, and instances may be returned. The
    job goes on until it runs again, unless there is no plan, or ``secure_s`` has passed.
    """
    phase = active.phase
    if isinstance(phase, Stopping) and phase.then == "paused":
        return PASS
    is_up = isinstance(phase, Running | Stopping)
    if isinstance(phase, Starting):
        assert active.generation is not None
        is_up = has_started(state, active.generation)  # Under a new leader it may train already.
    if is_up and is_alive(state, active):
        return stop(state, active, "paused", reason)
    if isinstance(phase, Held) or (isinstance(phase, Waiting) and active.asked.is_refused):
        return close(state, active, "paused", reason)
    if last_steering_order(active) == "resume":
        checkpointing = replace(active.checkpointing, securing=None)
        return _settle(state, replace(active, checkpointing=checkpointing), order)
    # Survivors of a loss have yet to say what they seal.
    is_gathering = isinstance(phase, Waiting) and state.now < phase.since + (
        state.options.failures_gather_s
    )
    if is_gathering or not holders_reported(state, active):
        return PASS
    restore, _ = restore_now(state, active)
    kept = secure(state, active, restore.point if restore.source == "memory" else None)
    if kept is PASS:
        return close(state, active, "paused", reason)
    return PASS if kept is WAIT else kept


def _settle(state: State, active: Active, order: Order, *said: Note) -> Step:
    return Step(replace(state, active=without(active, order)), (SettleOrder(order.id), *said))
