"""Requests that wait in the provider's queue: what becomes of them, and when they are withdrawn.

One that waits counts in the hourly cost, since it may be granted at any moment, and costs nothing.
"""

from __future__ import annotations

from dataclasses import replace

from sailord.capacity.core.budget import is_affordable
from sailord.capacity.core.cooldowns import cool_down
from sailord.capacity.core.model import (
    Cancel,
    CapacityCommand,
    CapacityDecision,
    CapacityState,
    Log,
    PendingRequest,
)
from sailord.capacity.core.supply import supply
from sailord.providers.interface import Observation


def queued(asked: PendingRequest, at: float) -> PendingRequest:
    """Return a request as one that waits in the queue at that time."""
    return replace(
        asked,
        is_queued=True,
        queued_since=asked.queued_since or at,
        since=max(asked.since, at),
        is_in_doubt=False,
    )


def follow_queue(state: CapacityState, seen: Observation) -> CapacityDecision:
    """Apply what an observation says of the queue.

    A request that left it without a word is in doubt: its instances should appear. One that was
    given up, and waits after all, counts again.
    """
    told: list[CapacityCommand] = []
    made = {each.instance.request_id for each in state.instances.values()}
    made |= {instance.request_id for instance in seen.instances}
    for id_, ask in seen.queued.items():
        if id_ not in state.asks and id_ not in made:
            found = PendingRequest(ask, state.prices.get(ask.pool, 0.0), seen.at)
            state = _with(state, found)
    refused = {each.request_id: each for each in seen.refused}
    for id_, asked in tuple(state.asks.items()):
        pool, why = asked.ask.pool, refused.get(id_)
        if id_ in seen.queued:
            state = _with(state, queued(asked, seen.at))
        elif why is not None:
            left = {other: each for other, each in state.asks.items() if other != id_}
            state = replace(state, asks=left)
            if asked.cancelled_at is not None:
                told.append(Log(f"withdrawn: {pool}"))
            else:
                state = cool_down(state, pool, why.kind, why.text, why.retry_after_s)
                told.append(Log(f"refused ({why.kind}) after waiting: {pool}: {why.text}"))
        elif asked.is_queued and pool.zone not in (*seen.unseen_zones, *seen.unseen_queues):
            gone = replace(asked, is_queued=False, is_in_doubt=True, doubted_at=state.now)
            state = _with(state, gone)
    return state, tuple(told)


def withdraw(state: CapacityState) -> CapacityDecision:
    """Withdraw waiting requests that were not wanted for ``surplus_s``.

    At once where nothing at all is wanted, and above a budget.
    """
    told: list[CapacityCommand] = []
    there = supply(state)
    for asked in tuple(state.asks.values()):
        if not asked.is_queued or not (state.is_target_set or state.stop):
            continue
        pool = asked.ask.pool
        # A waiting request goes before a budget pauses the job: it trains nothing.
        is_over = bool(state.stop) or not is_affordable(state, 0.0)
        if not is_over and there[pool] - asked.ask.count < state.target.get(pool, 0):
            if asked.unwanted_since is not None:
                state = _with(state, replace(asked, unwanted_since=None))
            continue
        since = state.now if asked.unwanted_since is None else asked.unwanted_since
        now = replace(asked, unwanted_since=since)
        is_due = state.now >= since + state.policy.surplus_s or not any(state.target.values())
        if is_over or is_due:
            last = asked.cancelled_at
            if last is None or state.now >= last + state.policy.delete_again_s:
                now = replace(now, cancelled_at=state.now)
                told.append(Cancel(asked.ask))
        state = _with(state, now)
    return state, tuple(told)


def _with(state: CapacityState, asked: PendingRequest) -> CapacityState:
    return replace(state, asks={**state.asks, asked.ask.request_id: asked})
