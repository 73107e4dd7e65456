"""Which surplus instances are deleted, which are drained, and which stay for now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sailord.capacity.core import model
from sailord.capacity.core.budget import is_affordable, usd_per_hour, usd_per_hour_limit
from sailord.capacity.core.model import CapacityState
from sailord.capacity.core.rented_instance import RentedInstance
from sailord.capacity.core.supply import obtainable, supply
from sailord.providers.interface import Pool


def shrink(state: CapacityState) -> tuple[CapacityState, tuple[model.CapacityCommand, ...]]:
    """Give up what was surplus for ``surplus_s``: unused instances first, the youngest first.

    Above the hourly limit it goes at once. An unused instance whose memory the job may need is
    drained instead of deleted.
    """
    if not state.is_target_set:
        return state, ()
    # A quarantined one stays to be looked at for as long as anything is wanted.
    is_any_wanted = any(state.target.values())
    live: dict[Pool, list[RentedInstance]] = {}
    for rented in state.instances.values():
        is_here = rented.is_live if is_any_wanted else rented.is_staying
        if is_here and rented.instance.request_id:
            live.setdefault(rented.instance.pool, []).append(rented)
    since: dict[Pool, float] = {}
    spare: list[RentedInstance] = []
    held: list[RentedInstance] = []
    instances = dict(state.instances)
    for pool, present in sorted(live.items()):
        too_many = len(present) - state.target.get(pool, 0)
        if too_many <= 0:
            continue
        since[pool] = state.surplus_since.get(pool, state.now)
        if state.now < since[pool] + state.policy.surplus_s and is_affordable(state, 0.0):
            continue
        unused = [each for each in present if each.instance.node not in state.in_use]
        unused.sort(
            key=lambda each: (
                each.instance.node in state.holding,
                each.joined_at is not None,
                -each.instance.created_at,
            )
        )
        for rented in unused[:too_many]:
            if rented.instance.node in state.holding:
                held.append(replace(rented, is_drained=True))
                instances[rented.instance.id] = held[-1]
            else:
                instances[rented.instance.id] = replace(rented, why="surplus")
        used = [each for each in present if each.instance.node in state.in_use]
        spare += used[: max(too_many - len(unused), 0)]
    state = replace(state, surplus_since=since, instances=instances)
    leaving = spare if _has_all(state, live) else _blocking_surplus(state, spare)
    drained = {each.instance.id: replace(each, is_drained=True) for each in leaving}
    return replace(state, instances={**instances, **drained}), tuple(map(drain_of, held + leaving))


def drain_of(rented: RentedInstance) -> model.Drain:
    """Return the command that drains an instance for which there is no use any more."""
    return model.Drain(rented.instance.node, f"{rented.instance.pool} is surplus")


def _has_all(state: CapacityState, live: Mapping[Pool, list[RentedInstance]]) -> bool:
    """Return whether the whole target is up; until then the job keeps the instances it uses."""
    return all(
        sum(each.joined_at is not None for each in live.get(pool, ())) >= count
        for pool, count in state.target.items()
    )


def _blocking_surplus(state: CapacityState, spare: list[RentedInstance]) -> list[RentedInstance]:
    """Return the surplus in use that must go so that the budget pays for the rest and the target.

    Without this the job would keep it forever, and the target would never be requested. Nothing is
    given up for what would only wait in a queue, for hours perhaps.
    """
    most = usd_per_hour_limit(state)
    if most is None or not spare:
        return []
    running = [each for each in state.instances.values() if each.ended_at is None]
    going = (each.usd_per_hour or 0.0 for each in running if not each.is_staying)
    withdrawn = (a.usd_per_hour_all for a in state.asks.values() if a.cancelled_at is not None)
    room = most - usd_per_hour(state) + sum(going) + sum(withdrawn)
    within_reach = room + sum(each.usd_per_hour or 0.0 for each in spare)
    needed, there = 0.0, supply(state)
    soon = (pool for pool in state.target if not pool.flex)
    for pool in sorted(soon, key=lambda pool: state.prices.get(pool, 0.0)):
        for _ in range(min(state.target[pool] - there[pool], obtainable(state, pool, there))):
            if needed + state.prices[pool] <= within_reach:
                needed += state.prices[pool]

    def usd_per_gpu(rented: RentedInstance) -> float:
        return (rented.usd_per_hour or 0.0) / max(rented.instance.pool.gpus, 1)

    leaving: list[RentedInstance] = []
    for rented in sorted(spare, key=usd_per_gpu, reverse=True):
        if room < needed:
            leaving.append(rented)
            room += rented.usd_per_hour or 0.0
    return leaving
