"""Decides which instances to request and to delete: events in, commands out, no clock.

The planner sets the target (``sailord.planning.capacity_search``): how many instances of each pool
there should be. This reconciles towards it, one request at a time per pool. Five invariants hold:

1. a request is sent once; one with an unknown outcome counts as granted until an observation
   settles it;
2. only instances that carry a request id are ever deleted, by their unique number;
3. no request without a known price, against a quota or a budget, or during a pool's cooldown;
4. only an agent that registers proves a pool: until then few of its instances are up at once
   (unless they wait in a queue, whole), and after a few in a row without an agent it is stopped;
5. surplus instances are deleted, unused ones first; those that the job uses are drained only once
   the whole target is up, or earlier if the budget cannot pay for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import assert_never

from sailord.capacity.core import boots, model
from sailord.capacity.core.budget import (
    is_affordable,
    spent_usd,
    stop_due,
)
from sailord.capacity.core.cooldowns import cool_down, end_stockouts
from sailord.capacity.core.deadline import keep_deadline, keep_job_budget, pace_of, pace_record
from sailord.capacity.core.model import CapacityState
from sailord.capacity.core.reconcile import adopt, observe
from sailord.capacity.core.rented_instance import RentedInstance
from sailord.capacity.core.retirement import is_replaced, retire
from sailord.capacity.core.supply import obtainable, supply
from sailord.capacity.core.surplus import drain_of, shrink
from sailord.capacity.core.waiting import queued, withdraw
from sailord.providers.interface import (
    Granted,
    InDoubt,
    InstanceRequest,
    Pool,
    Queued,
    Refused,
    RequestOutcome,
)

MACHINES_PER_REQUEST_MAX = 16
"""More are requested one after the other, except by a request that may wait."""
COUNTS_S = 30.0
"""A longer gap between two counts of agents means that sailord or the store was down."""


def decide(state: CapacityState, event: model.CapacityEvent) -> model.CapacityDecision:
    """Apply an event; return the new state and the commands that follow.

    Each step sees what those before it have decided: first the money and the target, then what
    exists no longer, then what is too much, and last what is missing.
    """
    state, logged = _apply(replace(state, now=max(state.now, event.at)), event)
    if not state.prefix:
        return state, ()
    # First: once the total budget is spent, no step below requests anything.
    state, stopped = _check_budget(state)
    # Sets the target, with which the steps below compare what is there.
    state, paced = keep_deadline(state)
    # After the total budget: a stop is a reason to pause a job that uses rented instances.
    state, parted = keep_job_budget(state)
    # Before anything is counted: these requests and instances do not count as supply any more.
    state, doubted = _expire_doubts(state)
    state, faulty = _mark_unusable(state)
    # After the faulty ones: those need no replacement of their own.
    state, retired = retire(state)
    # Before instances are given up: what waits in a queue trains nothing.
    state, withdrawn = withdraw(state)
    state, drained = shrink(state)
    # After all steps that mark instances for deletion.
    state, deleted = _delete(state)
    # Last: what is missing after all that.
    state, created = _grow(state)
    return state, (
        *(*logged, *stopped, *paced, *parted, *doubted),
        *(*faulty, *retired, *withdrawn, *drained, *deleted, *created),
    )


def record_of(state: CapacityState) -> model.CapacityRecord:
    """Return what the next leader must know, to be stored."""
    stopped = state.policy.usd_max if state.stop else None
    return model.CapacityRecord(
        spent_usd=state.spent_usd,
        asks=tuple(state.asks.values()),
        machines=tuple(state.instances.values()),
        stop=state.stop,
        stopped_at_usd=stopped,
        boots=tuple(state.boots.values()),
        boots_failed=state.boots_failed,
        retried_at=state.retried_at,
        pace=pace_record(state.pace),
        spent_gpu_us=state.spent_gpu_us,
        ended_nodes=state.ended_nodes,
    )


# ---- events -------------------------------------------------------------------------------------


def _apply(state: CapacityState, event: model.CapacityEvent) -> model.CapacityDecision:
    match event:
        case model.TookOver():
            return _take_over(state, event)
        case model.SteppedDown():
            return CapacityState(state.policy, state.now), ()
        case model.Observed():
            return observe(state, event.observation)
        case model.RequestAnswered():
            return _take_answer(state, event.outcome)
        case model.DeletionAnswered():
            told = tuple(model.Log(f"{id_} was not deleted: {why}") for id_, why in
                         sorted(event.deleted.failed.items()))  # fmt: skip
            return state, told
        case model.PricesRead():
            return _reprice(state, event.prices), ()
        case model.QuotasRead():
            return replace(state, quotas=event.quotas), ()
        case model.AgentsCounted():
            return _count_agents(state, event), ()
        case model.TargetSet():
            target, options = dict(event.target), event.options
            return replace(state, target=target, options=options, is_target_set=True), ()
        case model.ProgressSeen():
            return replace(state, progress=event.progress), ()
        case model.StockReported():
            return end_stockouts(state, event), ()
        case model.BootsRetried():
            return boots.retry(state), (model.Log("failed boots are forgotten by an order"),)
        case model.Tick():
            return state, ()
        case _:
            assert_never(event)


def _take_over(state: CapacityState, event: model.TookOver) -> model.CapacityDecision:
    """Take over from the last leader: the outcome of its requests is unknown.

    Drains are repeated, since the last leader may have died between storing and ordering them.
    """
    books, now = event.books, state.now
    asks = {
        a.ask.request_id: replace(
            a, is_in_doubt=not a.is_queued, since=min(a.since, now), doubted_at=now
        )
        for a in books.asks
    }
    is_spent = books.stopped_at_usd is not None and books.stopped_at_usd == state.policy.usd_max
    state = CapacityState(
        state.policy,
        state.now,
        event.prefix,
        asks=asks,
        instances={each.instance.id: each.as_of(now) for each in books.machines},
        spent_usd=books.spent_usd,
        stop=books.stop if is_spent else "",
        boots={record.pool: record for record in books.boots},
        boots_failed=books.boots_failed,
        retried_at=books.retried_at,
        pace=pace_of(books.pace),
        spent_gpu_us=books.spent_gpu_us,
        ended_nodes=books.ended_nodes,
    )
    return state, tuple(
        drain_of(each) for each in books.machines if each.is_drained and not each.why
    )


def _take_answer(state: CapacityState, outcome: RequestOutcome) -> model.CapacityDecision:
    asked = state.asks.get(outcome.request_id)
    if asked is None:
        return state, ()  # An observation settled it, or it expired.
    pool, asks = asked.ask.pool, dict(state.asks)
    doubted = replace(asked, is_in_doubt=True, doubted_at=state.now)
    match outcome:
        case Granted(instances=()):  # They are being made and have no names yet.
            asks[outcome.request_id] = doubted
            return replace(state, asks=asks), ()
        case Granted():
            del asks[outcome.request_id]
            for instance in outcome.instances:
                state = adopt(state, instance, asked.usd_per_hour, was_seen=False)
            cooldowns = {
                p: rest for p, rest in state.cooldowns.items() if p != pool or rest.kind == "boot"
            }
            text = f"{len(outcome.instances)} of {asked.ask.count} granted: {pool}"
            return replace(state, asks=asks, cooldowns=cooldowns), (model.Log(text),)
        case Refused():
            del asks[outcome.request_id]
            state = cool_down(
                replace(state, asks=asks), pool, outcome.kind, outcome.text, outcome.retry_after_s
            )
            wait_s = state.cooldowns[pool].until - state.now
            text = f"refused ({outcome.kind}): {pool}: {outcome.text}; cooldown {wait_s:.0f} s"
            return state, (model.Log(text),)
        case Queued():
            asks[outcome.request_id] = queued(asked, state.now)
            text = f"{asked.ask.count} of {pool} wait in the provider's queue"
            return replace(state, asks=asks), (model.Log(text),)
        case InDoubt():
            asks[outcome.request_id] = doubted
            text = f"no answer ({outcome.request_id}): {pool}; the next observation settles it"
            return replace(state, asks=asks), (model.Log(text),)
        case _:
            assert_never(outcome)


def _reprice(state: CapacityState, prices: Mapping[Pool, float]) -> CapacityState:
    """Apply new prices from now on."""
    instances = {
        id_: _at_price(rented, prices.get(rented.instance.pool), state.now)
        for id_, rented in state.instances.items()
    }
    return replace(state, prices=dict(prices), instances=instances)


def _at_price(rented: RentedInstance, price: float | None, now: float) -> RentedInstance:
    if price is None or price == rented.usd_per_hour or rented.ended_at is not None:
        return rented
    if rented.usd_per_hour is None:
        return replace(rented, usd_per_hour=price)
    return replace(
        rented,
        usd_per_hour=price,
        priced_from=max(now, rented.priced_from),
        paid_usd=rented.usd(now),
        paid_gpu_us=rented.gpu_us(now),
    )


def _count_agents(state: CapacityState, event: model.AgentsCounted) -> CapacityState:
    instances = dict(state.instances)
    for id_, rented in state.instances.items():
        name = rented.instance.node
        agent = event.agents.get(name) if name else None
        if agent is None:
            if rented.joined_at is not None:
                instances[id_] = replace(rented, absent_since=rented.absent_since or state.now)
            continue
        gpus = rented.gpus if agent.gpus is None else agent.gpus
        if rented.joined_at is None and (gpus or 0) >= rented.instance.pool.gpus:
            state = boots.note_joined(state, rented.instance.pool)
        is_idle = agent.is_leaving and name not in event.in_use | event.holding
        instances[id_] = replace(
            rented,
            joined_at=rented.joined_at or state.now,
            absent_since=None,
            is_leaving=agent.is_leaving,
            is_out=agent.is_out,
            idle_since=(rented.idle_since or state.now) if is_idle else None,
            gpus=gpus,
        )
    has_gap = state.now > state.looked_at + COUNTS_S
    return replace(
        state,
        instances=instances,
        in_use=event.in_use,
        holding=event.holding,
        looked_at=state.now,
        counting_since=state.now if has_gap else state.counting_since,
    )


# ---- rules, in the order of decide --------------------------------------------------------------


def _check_budget(state: CapacityState) -> model.CapacityDecision:
    if state.observed_at is None:
        return state, ()  # What ended while no sailord was there counts until it is known.
    due = stop_due(state)
    if not due or state.stop in (due, "ended"):
        return state, ()  # A stop is final.
    why = f"${spent_usd(state):,.2f} of the total budget of ${state.policy.usd_max:,.2f} is spent"
    told: tuple[model.CapacityCommand, ...] = (model.Log(f"{why}: no further requests"),)
    if not state.stop:
        told = (*told, model.PauseJob(why))
        state = replace(state, paused="" if state.progress is None else state.progress.job)
    return replace(state, stop=due), told


def _expire_doubts(state: CapacityState) -> model.CapacityDecision:
    """Give up requests in doubt that no observation has shown within ``doubt_s``."""
    told: list[model.CapacityCommand] = []
    made = Counter(each.instance.request_id for each in state.instances.values())
    for id_, asked in tuple(state.asks.items()):
        pool = asked.ask.pool
        over_at = max(asked.since, asked.doubted_at) + state.policy.doubt_s
        if asked.is_in_doubt and state.observed_at is not None and state.observed_at >= over_at:
            left = {other: each for other, each in state.asks.items() if other != id_}
            state = replace(state, asks=left)
            if made[id_]:
                told.append(model.Log(f"{id_} made {made[id_]} of {asked.ask.count}: {pool}"))
            elif asked.cancelled_at is not None:
                told.append(model.Log(f"withdrawn: {pool}"))
            else:
                state = cool_down(state, pool, "unknown", "no answer")
                told.append(model.Log(f"{id_} made nothing: {pool}"))
    return state, tuple(told)


def _mark_unusable(state: CapacityState) -> model.CapacityDecision:
    """Mark instances for deletion that are faulty, lost, drained or beyond the budget."""
    told: list[model.CapacityCommand] = []
    for id_, rented in tuple(state.instances.items()):
        if rented.why or rented.is_missed or not rented.instance.request_id:
            continue
        fault = _fault_of(state, rented)
        if fault and _is_needed(state, rented):
            # Its memory may have the only copy of a state: that is moved off first.
            if not rented.is_drained:
                drained = replace(rented, is_drained=True)
                state = replace(state, instances={**state.instances, id_: drained})
                told.append(model.Drain(rented.instance.node, fault))
            fault = ""
        why = fault or _why_unneeded(state, rented)
        if why:
            marked = replace(state.instances[id_], why=why)
            state = replace(state, instances={**state.instances, id_: marked})
        if fault and boots.counts(state, rented):
            pool = rented.instance.pool
            was_stopped = boots.why_stopped(state, pool)
            state = boots.note_failed(state, pool, fault)
            state = cool_down(state, pool, "boot", fault)
            if boots.why_stopped(state, pool) and not was_stopped:
                told.append(model.Log(f"stopped: {pool}: {boots.why_stopped(state, pool)}"))
    return state, tuple(told)


def _is_needed(state: CapacityState, rented: RentedInstance) -> bool:
    """Return whether the job may need it; before the first count of agents it may need each."""
    return not state.looked_at or rented.instance.node in state.in_use | state.holding


def _fault_of(state: CapacityState, rented: RentedInstance) -> str:
    """Return what is wrong with an instance; its pool gets a cooldown for it."""
    policy, gpus = state.policy, rented.instance.pool.gpus
    if rented.joined_at is None:
        begun = max(rented.running_since or rented.known_since, state.counting_since)
        is_late = state.looked_at >= begun + policy.boot_s
        return f"no agent registered within {policy.boot_s:.0f} s" if is_late else ""
    if rented.gpus is not None and rented.gpus < gpus:
        return f"it has {rented.gpus} of its {gpus} GPUs"
    return ""


def _why_unneeded(state: CapacityState, rented: RentedInstance) -> str:
    is_needed = _is_needed(state, rented)
    lost_s, surplus_s = state.policy.lost_s, state.policy.surplus_s
    if state.stop == "ended" or (state.stop and not is_needed):
        return "the budget is spent"
    if _has_lasted(state, rented.absent_since, lost_s):
        return f"its agent has been silent for {lost_s:.0f} s"
    if rented.is_retiring and not is_needed and is_replaced(state, rented.instance.pool):
        return "the provider would soon delete it"
    # Other drains may be withdrawn (an agent that restarts drains), so they must last.
    is_idle = rented.is_drained or _has_lasted(state, rented.idle_since, surplus_s)
    return "it was drained" if is_idle and not is_needed else ""


def _has_lasted(state: CapacityState, since: float | None, seconds: float) -> bool:
    """Return whether this many seconds passed since then in which agents were counted."""
    return since is not None and state.looked_at >= max(since, state.counting_since) + seconds


def _delete(state: CapacityState) -> model.CapacityDecision:
    """Delete marked instances; repeat every ``delete_again_s`` until they no longer exist."""
    due: list[str] = []
    instances = dict(state.instances)
    for id_, rented in state.instances.items():
        if not rented.why or not rented.instance.request_id:
            continue
        last = rented.deletion_at
        if last is None or state.now >= last + state.policy.delete_again_s:
            due.append(id_)
            instances[id_] = replace(rented, deletion_at=state.now, deletions=rented.deletions + 1)
    if not due:
        return state, ()
    return replace(state, instances=instances), (model.DeleteInstances(tuple(sorted(due))),)


def _grow(state: CapacityState) -> model.CapacityDecision:
    """Request missing instances: one request at a time per pool, those that may wait last.

    What may wait is requested as a whole: else a part would be billed while the rest waits.
    """
    if state.stop or state.observed_at is None:
        return state, ()  # What exists is unknown before the first observation.
    orders: list[model.CapacityCommand] = []
    there, busy = supply(state), {asked.ask.pool for asked in state.asks.values()}
    for pool, wanted in sorted(state.target.items(), key=lambda each: (each[0].flex, each[0])):
        missing = wanted - there[pool]
        if missing <= 0 or pool in busy or pool.zone in state.unseen_zones:
            continue  # What a request makes in a zone that is not seen could not be deleted.
        room = boots.room(state, pool)
        if pool.flex and room > 0:
            room = boots.NO_LIMIT
        most = missing if pool.flex else min(missing, MACHINES_PER_REQUEST_MAX)
        least = most if pool.flex else 1
        count = min(most, obtainable(state, pool, there), room)
        if count < least:
            continue
        price = state.prices[pool]
        while count and not is_affordable(state, count * price):
            count -= 1
        if count < least:
            continue
        number = state.requests + 1
        ask = InstanceRequest(model.request_id_of(state.prefix, number), pool, count)
        asks = {**state.asks, ask.request_id: model.PendingRequest(ask, price, state.now)}
        state = replace(_use_quota(state, pool, count), asks=asks, requests=number)
        orders.append(model.Create(ask))
    return state, tuple(orders)


def _use_quota(state: CapacityState, pool: Pool, count: int) -> CapacityState:
    """Count a request against its quotas until they are read again."""
    quotas = tuple(
        replace(q, used_gpus=q.used_gpus + count * pool.gpus) if pool in q.pools else q
        for q in state.quotas or ()
    )
    return replace(state, quotas=quotas)
