"""Stores the observed lifetimes of nodes, so that the next leader starts with them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agents.protocol.codec import WireError, decode, encode
from agents.store.interface import Put
from planner.move_policy.node_lifetimes import LifetimeHistory, PoolRecord
from sailord.cluster_records import Gateway

SAVE_S = 60.0
"""How often they are written: a leader that dies loses at most this much."""


@dataclass(frozen=True, slots=True)
class PoolLifetimes:
    """The stored history of one pool."""

    pool: str
    record: PoolRecord


@dataclass(frozen=True, slots=True)
class StoredLifetimes:
    """The record in the store."""

    pools: tuple[PoolLifetimes, ...]


def to_record(history: LifetimeHistory) -> StoredLifetimes:
    """The history as a record."""
    return StoredLifetimes(tuple(PoolLifetimes(n, r) for n, r in sorted(history.pools.items())))


def from_record(stored: StoredLifetimes) -> LifetimeHistory:
    """The history of a record, without live nodes: what happened since was not observed."""
    return LifetimeHistory({each.pool: replace(each.record, nodes_up=0) for each in stored.pools})


async def save_lifetimes(gateway: Gateway, history: LifetimeHistory, term: int) -> None:
    """Write the history as leader of the term, unless that would replace what cannot be read."""
    if gateway.keys.lives in gateway.unreadable.found:
        return
    await gateway.write_as_leader(term, [Put(gateway.keys.lives, encode(to_record(history)))])


async def load_lifetimes(gateway: Gateway) -> LifetimeHistory:
    """Read the last leader's history; raises what the store raises."""
    entry = await gateway.store.get(gateway.keys.lives)
    try:
        return (
            LifetimeHistory()
            if entry is None
            else from_record(decode(StoredLifetimes, entry.value))
        )
    except WireError as error:
        gateway.unreadable.note(gateway.keys.lives, str(error))
        return LifetimeHistory()
