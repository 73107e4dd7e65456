"""How many instances of each pool there are, and how many more may be requested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from sailord.capacity.core import boots
from sailord.capacity.core.cooldowns import cooldown_of
from sailord.capacity.core.model import CapacityState
from sailord.providers.interface import Pool


def supply(state: CapacityState) -> Counter[Pool]:
    """Return usable and requested instances, by pool."""
    there = (each for each in state.instances.values() if each.needs_no_other(state.now))
    found = Counter(each.instance.pool for each in there)
    for asked in state.asks.values():
        found[asked.ask.pool] += asked.ask.count
    return found


def queued_supply(state: CapacityState) -> Counter[Pool]:
    """Return the instances whose requests wait in the provider's queue, by pool."""
    found = Counter[Pool]()
    for asked in state.asks.values():
        found[asked.ask.pool] += asked.ask.count if asked.is_queued else 0
    return found


def obtainable(state: CapacityState, pool: Pool, there: Mapping[Pool, int] | None = None) -> int:
    """Return how many more instances of a pool may be requested now.

    ``there`` is the result of ``supply``, passed by callers that ask about many pools.
    """
    if state.quotas is None or pool not in state.prices or state.stop:
        return 0
    if boots.why_stopped(state, pool) or cooldown_of(state, pool) is not None:
        return 0
    free = [q.free_gpus for q in state.quotas if pool in q.pools]
    limits = [gpus // pool.gpus for gpus in free if gpus is not None]
    most = state.policy.machines_per_pool_max - (there or supply(state)).get(pool, 0)
    return max(min([most, *map(int, limits)]), 0)


def draws_on_quotas(state: CapacityState) -> tuple[frozenset[str], frozenset[str]]:
    """Return what draws on quotas: instances and pending requests."""
    up = (id_ for id_, rented in state.instances.items() if rented.ended_at is None)
    return frozenset(up), frozenset(state.asks)
