"""Whether rented instances start agents, and how many may be requested until that is known.

A cloud's grant proves nothing: an instance that never boots is billed like any other. Only an agent
that registers with all its GPUs proves its pool. Until then few instances of a pool are up at once;
after a few failures in a row nothing more is requested until an operator has looked.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from sailord.capacity.core.model import BootRecord, CapacityState
from sailord.capacity.core.rented_instance import RentedInstance
from sailord.providers.interface import Pool

POOLS_STOPPED_MAX = 3
"""All pools are stopped by this many times the failures that stop one: the fault is then no
single pool's. While no pool has brought up an agent, the failures that stop one suffice."""
RETRY = "mend it, then order `sailorctl capacity --retry`"
NO_LIMIT = 10**6


def note_joined(state: CapacityState, pool: Pool) -> CapacityState:
    """An agent of this pool has registered: whatever failed before is mended."""
    boots = {**state.boots, pool: BootRecord(pool, has_joined=True)}
    cooldowns = {p: c for p, c in state.cooldowns.items() if p != pool or c.kind != "boot"}
    return replace(state, boots=boots, boots_failed=0, cooldowns=cooldowns)


def counts(state: CapacityState, rented: RentedInstance) -> bool:
    """Return whether a failure of this instance says something about its pool as it is now.

    One that was created before the last `--retry` may lack what the operator has mended.
    """
    return rented.instance.created_at > state.retried_at


def note_failed(state: CapacityState, pool: Pool, text: str) -> CapacityState:
    """An instance of this pool has started no agent, or one without all its GPUs."""
    known = _record(state, pool)
    boots = {**state.boots, pool: replace(known, failures=known.failures + 1, text=text)}
    return replace(state, boots=boots, boots_failed=state.boots_failed + 1)


def retry(state: CapacityState) -> CapacityState:
    """Forget all failures, also later ones of the instances that are up; proven pools stay so."""
    boots = {p: replace(record, failures=0, text="") for p, record in state.boots.items()}
    cooldowns = {p: c for p, c in state.cooldowns.items() if c.kind != "boot"}
    return replace(state, boots=boots, boots_failed=0, cooldowns=cooldowns, retried_at=state.now)


def why_stopped(state: CapacityState, pool: Pool) -> str:
    """Return why nothing more is requested of this pool, and the cure; empty: it is not stopped."""
    record = _record(state, pool)
    if record.failures >= state.policy.boot_failures_max:
        return f"{record.failures} instances in a row started no agent: {record.text}; {RETRY}"
    if state.boots_failed >= _failures_max(state):
        texts = sorted({r.text for r in state.boots.values() if r.text})
        return (
            f"{state.boots_failed} instances of all pools in a row started no agent: "
            f"{', '.join(texts)}; {RETRY}"
        )
    return ""


def room(state: CapacityState, pool: Pool) -> int:
    """Return how many instances of a pool may be requested, as far as trust in it goes."""
    record = _record(state, pool)
    if _is_trusted(record):
        return NO_LIMIT if not state.boots_failed else max(_count_failures_left(state), 0)
    here = state.policy.boot_failures_max - record.failures - _count_waiting(state)[pool]
    return max(min(here, _count_failures_left(state)), 0)


def _count_failures_left(state: CapacityState) -> int:
    """Return how many more instances may fail before all pools are stopped."""
    return _failures_max(state) - state.boots_failed - _count_waiting(state).total()


def _failures_max(state: CapacityState) -> int:
    most = state.policy.boot_failures_max
    is_any_proven = any(record.has_joined for record in state.boots.values())
    return most * POOLS_STOPPED_MAX if is_any_proven else most


def _count_waiting(state: CapacityState) -> Counter[Pool]:
    """Return instances without an agent yet, and requested ones, by pool that is not trusted.

    Requests that wait in a queue do not count: for hours no others would be sent.
    """
    asks = [asked.ask for asked in state.asks.values() if not asked.is_queued]
    found = Counter(ask.pool for ask in asks for _ in range(ask.count))
    found.update(
        rented.instance.pool
        for rented in state.instances.values()
        if rented.joined_at is None and rented.ended_at is None
        if rented.instance.request_id and not rented.why
    )
    return Counter({p: n for p, n in found.items() if not _is_trusted(_record(state, p))})


def _record(state: CapacityState, pool: Pool) -> BootRecord:
    return state.boots.get(pool) or BootRecord(pool)


def _is_trusted(record: BootRecord) -> bool:
    return record.has_joined and not record.failures
