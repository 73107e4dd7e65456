"""Keeps what was seen of machines' lives in the store, so that the next leader knows it too."""

from __future__ import annotations

from dataclasses import dataclass, replace

import structlog

from agents.protocol.codec import WireError, decode, encode
from agents.store import Put
from planner.move_policy.node_lifetimes import History, PoolRecord
from sailord.cluster_records import Gateway

log = structlog.get_logger("sailord")

KEEP_S = 60.0
"""How often it is written: what a leader saw since then is all that is lost with it."""


@dataclass(frozen=True, slots=True)
class Life:
    """What is remembered of one pool, by its name."""

    pool: str
    record: PoolRecord


@dataclass(frozen=True, slots=True)
class Lives:
    """As it stands in the store."""

    pools: tuple[Life, ...]


def written(history: History) -> Lives:
    """The history as a record."""
    return Lives(tuple(Life(name, record) for name, record in sorted(history.pools.items())))


def recalled(lives: Lives) -> History:
    """The history of a record; while nobody led, nobody saw who was up and who was lost."""
    return History({life.pool: replace(life.record, nodes_up=0) for life in lives.pools})


async def keep_lives(gateway: Gateway, history: History, term: int) -> None:
    """Write it as the leader of a term; raises what the store raises."""
    await gateway.write_as_leader(term, [Put(gateway.keys.lives, encode(written(history)))])


async def recall_lives(gateway: Gateway) -> History:
    """Read what the last leader saw; raises what the store raises."""
    entry = await gateway.store.get(gateway.keys.lives)
    try:
        return History() if entry is None else recalled(decode(Lives, entry.value))
    except WireError as error:
        log.warning("what is known of machines' lives cannot be read", error=str(error))
        return History()
