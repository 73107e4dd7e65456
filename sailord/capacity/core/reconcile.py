"""Reconciles the known instances and requests with an observation of the provider.

The provider's times of creation and deletion determine what an instance cost. An observation may
miss an instance before it reports the deletion, so its end is awaited for one more observation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from sailord.capacity.core import boots
from sailord.capacity.core.model import (
    ENDED_MAX,
    CapacityCommand,
    CapacityState,
    Log,
    PendingRequest,
)
from sailord.capacity.core.rented_instance import RentedInstance
from sailord.capacity.core.waiting import follow_queue
from sailord.providers.interface import Instance, Observation


def adopt(
    state: CapacityState, instance: Instance, price: float | None, *, was_seen: bool
) -> CapacityState:
    """Record an instance as it is now."""
    if instance.id in state.deleted:
        return state
    known = state.instances.get(instance.id)
    if known is None:
        known = RentedInstance(instance, price, instance.created_at, state.now)
    if known.is_missed:
        known = replace(known, is_missed=False, ended_at=None)
    since = known.running_since
    if since is None and instance.state == "running":
        since = state.now
    known = replace(
        known, instance=instance, was_seen=known.was_seen or was_seen, running_since=since
    )
    return replace(state, instances={**state.instances, instance.id: known})


def observe(
    state: CapacityState, seen: Observation
) -> tuple[CapacityState, tuple[CapacityCommand, ...]]:
    """Apply an observation; settle the cost of instances that no longer exist.

    One that began before the last is ignored: it lacks what was rented in between.
    """
    if state.observed_at is not None and seen.at < state.observed_at:
        return state, ()
    there = {i.id: i for i in seen.instances if i.state != "gone"}
    taken = {p.instance: p.at for p in seen.preemptions}
    for instance in there.values():
        asked = state.asks.get(instance.request_id)
        price = state.prices.get(instance.pool) if asked is None else asked.usd_per_hour
        state = adopt(state, instance, price, was_seen=True)
    state, waiting = follow_queue(state, seen)
    instances, told = {}, [*waiting]
    spent_usd, spent_gpu_us = state.spent_usd, state.spent_gpu_us
    ended_nodes = list(state.ended_nodes)
    for id_, rented in state.instances.items():
        name, end = rented.instance.name, _end_of(rented, taken, seen.ended_at)
        is_gone = id_ not in there and (id_ in seen.ended_at or _is_gone(state, rented, seen))
        is_taken = id_ in taken or rented.instance.state == "preempted"
        if is_gone and end is None:
            instances[id_] = replace(rented, ended_at=seen.at, is_missed=True)
        elif is_gone:
            ended, now = replace(rented, ended_at=end), max(state.now, seen.at)
            spent_usd, spent_gpu_us = spent_usd + ended.usd(now), spent_gpu_us + ended.gpu_us(now)
            ended_nodes.append(rented.instance.node or rented.instance.id)
            told.append(Log(f"{name} ended: {rented.why or 'deleted by the provider'}"))
        elif is_taken and rented.ended_at is None:
            why = "preempted"
            is_ours = rented.instance.request_id and not rented.why
            if is_ours and id_ not in taken and rented.joined_at is None:
                why = "powered off before its agent registered"
                if boots.counts(state, rented):
                    state = boots.note_failed(state, rented.instance.pool, why)
            told.append(Log(f"{name}: {why}"))
            instances[id_] = replace(rented, ended_at=end or seen.at, why=why)
        else:
            instances[id_] = replace(rented, ended_at=end)
    asks = _still_open(state, seen, there)
    deleted = state.deleted | (state.instances.keys() & seen.ended_at.keys() - instances.keys())
    state = replace(state, instances=instances, asks=asks, observed_at=seen.at, deleted=deleted)
    unseen_zones = {zone: state.unseen_zones.get(zone, seen.at) for zone in seen.unseen_zones}
    state = replace(state, unseen_zones=unseen_zones)
    state = replace(state, spent_usd=spent_usd, spent_gpu_us=spent_gpu_us)
    return replace(state, ended_nodes=tuple(ended_nodes[-ENDED_MAX:])), tuple(told)


def _end_of(
    rented: RentedInstance, taken: Mapping[str, float], ended_at: Mapping[str, float]
) -> float | None:
    """Return when an instance ended: as the provider reports, else as we observed."""
    id_ = rented.instance.id
    if id_ in taken:
        return taken[id_]
    told = ended_at.get(id_)
    if told is None or (rented.ended_at is not None and not rented.is_missed):
        return rented.ended_at  # Preempted before: it cost nothing by its deletion.
    return told


def _is_gone(state: CapacityState, rented: RentedInstance, seen: Observation) -> bool:
    """Return whether an observation without the instance means that it was deleted."""
    if rented.instance.pool.zone in seen.unseen_zones:
        return False
    return rented.was_seen or seen.at >= rented.known_since + state.policy.doubt_s


def _still_open(
    state: CapacityState, seen: Observation, there: Mapping[str, Instance]
) -> dict[str, PendingRequest]:
    """Return the requests without an outcome; those in doubt are settled by their instances.

    An observation without a request's zone says nothing of it: the doubt begins anew.
    """
    made = Counter(i.request_id for i in there.values())
    left = {}
    for id_, asked in state.asks.items():
        is_whole = made[id_] >= asked.ask.count
        is_over = made[id_] and asked.is_in_doubt and id_ not in seen.pending_requests
        if is_whole or is_over:
            continue
        is_unseen = asked.is_in_doubt and asked.ask.pool.zone in seen.unseen_zones
        doubted_at = max(asked.doubted_at, seen.at) if is_unseen else asked.doubted_at
        left[id_] = replace(asked, doubted_at=doubted_at)
    return left
