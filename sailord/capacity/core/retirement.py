"""Replaces instances that the provider will delete by itself, before it does."""

from __future__ import annotations

from dataclasses import replace

from sailord.capacity.core.model import CapacityState, Drain
from sailord.providers.interface import Pool

RETIRE_S = 1200.0
"""Instances that the provider will delete are replaced one by one, each in this time."""
RETIRE_ALL_S = 8 * 3600.0
"""Where many would end at once, each is replaced in its share of this time."""
LIFE_SHARE = 0.5
"""That time is at most this share of the shortest life, so that a new one is not replaced at
once."""
LAST_DRAIN_S = 300.0
"""The job moves off an instance this long before its deletion, replaced or not."""


def retire(state: CapacityState) -> tuple[CapacityState, tuple[Drain, ...]]:
    """Replace instances that the provider will soon delete by itself, one after the other.

    The job moves off each as soon as all that is wanted is up without it: else both would be paid.
    """
    ending = sorted(
        (rented.instance.ends_at, id_)
        for id_, rented in state.instances.items()
        if rented.instance.ends_at is not None
        and rented.instance.request_id
        and not (rented.is_drained or rented.why)
    )
    instances, drained = dict(state.instances), []
    lives = (ends_at - state.instances[id_].instance.created_at for ends_at, id_ in ending)
    all_s = min(RETIRE_ALL_S, LIFE_SHARE * min(lives, default=0.0))
    slot_s, begin = min(RETIRE_S, all_s / max(len(ending), 1)), float("inf")
    has_all = bool(ending) and all(is_replaced(state, pool) for pool in state.target)
    for ends_at, id_ in reversed(ending):
        begin, is_last = min(begin, ends_at) - slot_s, state.now >= ends_at - LAST_DRAIN_S
        if state.now >= begin or is_last:
            rented = state.instances[id_]
            goes = is_last or (rented.is_retiring and has_all and any(state.target.values()))
            instances[id_] = replace(rented, is_retiring=True, is_drained=goes)
            if goes:
                why = "the provider will soon delete it"
                drained.append(Drain(rented.instance.node, why, ends_at))
    return replace(state, instances=instances), tuple(drained)


def is_replaced(state: CapacityState, pool: Pool) -> bool:
    """Return whether as many agents as wanted are there without those that retire."""
    live = [
        each for each in state.instances.values() if each.is_live and each.joined_at is not None
    ]
    present = sum(rented.instance.pool == pool for rented in live)
    return state.is_target_set and present >= state.target.get(pool, 0)
