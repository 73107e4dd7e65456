"""After replicas differed, the job goes back to the newest checkpoint from before that.

Ranks compare their bits every few steps. Once a rank has wrong ones, the gradients of all ranks
are computed with them, until that is noticed: no replica is right, not even those that agree.
"""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import Durable, Order
from sailord.core.model.commands import CheckDurable, GiveOrder, Note
from sailord.core.model.phases import Closing, Held, Opening
from sailord.core.model.rule import PASS, WAIT, RuleAnswer, Step
from sailord.core.model.state import Active, Check, State
from sailord.core.queries.differences import agreed_at, id_of_rollback, is_decided
from sailord.core.queries.replan_triggers import last_steering_order
from sailord.core.rules.checkpoint_rules import change_checkpointing, commit_next

DECIDE_WITHIN_S = 60.0
"""Seconds until the job goes on without a checkpoint: a state that may be wrong is better than to
wait for a storage that does not answer."""


def roll_back_difference(state: State, active: Active) -> RuleAnswer:
    """Order a rollback, once it is known which checkpoint can be read; without one, go on."""
    generation = active.generation
    if generation is None or isinstance(active.phase, Opening | Closing | Held):
        return PASS
    agreed = agreed_at(state, generation)
    if agreed is None or is_decided(state, active, generation):
        return PASS
    if last_steering_order(active) == "cancel":
        return PASS
    known = active.checkpointing
    if known.differed_at is None:
        return Step(change_checkpointing(state, active, differed_at=state.now))
    if state.now >= known.differed_at + DECIDE_WITHIN_S:
        return _go_on(state, active, f"its storage has not answered for {DECIDE_WITHIN_S:.0f} s")
    # A checkpoint of right steps may be on its way; no other is committed any more.
    moved = commit_next(state, active)
    if moved is not PASS:
        return moved
    if known.commit is not None:
        return WAIT
    durable = state.durables.get(active.job)
    if durable is None:
        return _go_on(state, active, "there is no checkpoint")
    check = known.check
    if check is None or (check.of, check.step_max) != (durable, agreed):
        if state.now < known.retry_at:
            return WAIT
        command = CheckDurable(state.job, durable, is_thorough=False, step_max=agreed)
        check = Check(durable, since=state.now, step_max=agreed)
        return Step(change_checkpointing(state, active, check=check), (command,))
    if check.found is not None:
        return _go_back(state, active, check.found)
    return _go_on(state, active, check.why_none) if check.why_none else WAIT


def _go_back(state: State, active: Active, durable: Durable) -> Step:
    assert active.generation is not None
    reason = _describe_steps(state, active)
    id_ = id_of_rollback(active.generation)
    order = Order(id_, "rollback", active.job, reason=reason, durable=durable, wrong_bits=True)
    told = Note(
        f"going back to step {durable.point.step}: {reason}", active.job, is_transition=True
    )
    decided = _mark_decided(state, replace(active, orders=(*active.orders, order)))
    return Step(decided, (GiveOrder(order), told))


def _go_on(state: State, active: Active, why: str) -> Step:
    text = f"{_describe_steps(state, active)}, and the job goes on from them: {why}"
    return Step(_mark_decided(state, active), (Note(text, active.job, is_transition=True),))


def _describe_steps(state: State, active: Active) -> str:
    assert active.generation is not None
    agreed = agreed_at(state, active.generation)
    return f"steps after {agreed} may be wrong, since replicas differed"


def _mark_decided(state: State, active: Active) -> State:
    assert active.generation is not None
    known = state.known_orders | {id_of_rollback(active.generation)}
    return change_checkpointing(
        replace(state, known_orders=known), active, check=None, differed_at=None
    )
