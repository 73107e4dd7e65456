"""What operators order of a job, carried out as soon as its phase allows it."""

from __future__ import annotations

from dataclasses import replace

from sailord.changes import order_at_hand
from sailord.model import (
    Active,
    Closing,
    Held,
    Opening,
    Outcome,
    SettleIntent,
    State,
    Stopping,
    Waiting,
)
from sailord.moves import close, enter, stop, without
from sailord.standing import is_alive


def obey(state: State, active: Active) -> Outcome | None:
    """Carry out the first order that is not yet done."""
    order = order_at_hand(active)
    if order is None or isinstance(active.phase, Opening | Closing):
        return None
    reason = order.reason or f"{order.kind} was ordered"
    match order.kind:
        case "cancel":
            return close(state, active, "cancelled", reason)
        case "pause" if isinstance(active.phase, Stopping) and active.phase.then == "paused":
            return None
        case "pause" if is_alive(state, active):
            return stop(state, active, "paused", reason)
        case "pause":
            return close(state, active, "paused", reason)
        case "resume" | "rollback" if isinstance(active.phase, Held):
            job = replace(active.job, state="running", reason=reason)
            again = replace(active, job=job, failures=0, not_before=state.now, is_refused=False)
            again = replace(again, considered=frozenset(), check=None)
            waiting = Waiting(reason, state.now)
            if order.kind == "rollback":
                return enter(replace(state, active=again), waiting)
            again = without(again, order)
            return enter(replace(state, active=again), waiting, SettleIntent(order.id))
        case "replan" | "rollback":
            return None  # ``changes`` asks for it.
        case _:  # It goes on already.
            return replace(state, active=without(active, order)), (SettleIntent(order.id),)
