"""After replicas differed, the job goes back to the newest checkpoint of before.

Ranks compare their bits every few steps. Once a rank has wrong ones, the gradients of all ranks
are computed with them, until that is noticed: no replica is right, not even those that agree. Up to
the last comparison all were.
"""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import Order
from sailord.core.model.commands import CheckDurable, GiveOrder, Note
from sailord.core.model.phases import Stopping, Waiting
from sailord.core.model.rule import PASS, WAIT, RuleAnswer, Step
from sailord.core.model.state import Active, Check, State
from sailord.core.queries.active_job import agreed_at
from sailord.core.queries.replan_triggers import last_rollback


def roll_back_difference(state: State, active: Active) -> RuleAnswer:
    """Order a rollback, once it is known which checkpoint can be read; without one, go on.

    Storage that does not answer counts as none: a state that may be wrong is better than to wait.
    """
    generation, durable = active.generation, state.durables.get(active.job)
    if generation is None or not isinstance(active.phase, Waiting | Stopping):
        return PASS
    agreed = agreed_at(state, generation)
    id_of_order = f"differs-{generation.job}-{generation.number}"
    is_decided = id_of_order in state.known_orders or last_rollback(active) is not None
    if agreed is None or durable is None or is_decided:
        return PASS
    check = active.checkpointing.check
    if check is None or (check.of, check.step_max) != (durable, agreed):
        command = CheckDurable(state.job, durable, is_thorough=False, step_max=agreed)
        check = Check(durable, since=state.now, step_max=agreed)
        return Step(_with_check(state, active, check), (command,))
    if check.found is None and not check.why_none:
        return WAIT
    state = replace(state, known_orders=state.known_orders | {id_of_order})
    about = f"steps after {agreed} may be wrong, since replicas differed"
    if check.found is None:
        text = f"{about}, and the job goes on from them: {check.why_none}"
        told = Note(text, active.job, is_transition=True)
        return Step(_with_check(state, active, None), (told,))
    order = Order(id_of_order, "rollback", active.job, reason=about, durable=check.found)
    # Before a pause, which would make the wrong steps durable.
    active = replace(active, orders=(order, *active.orders))
    text = f"going back to step {check.found.point.step}: {about}"
    told = Note(text, active.job, is_transition=True)
    return Step(_with_check(state, active, None), (GiveOrder(order), told))


def _with_check(state: State, active: Active, check: Check | None) -> State:
    checkpointing = replace(active.checkpointing, check=check)
    return replace(state, active=replace(active, checkpointing=checkpointing))
