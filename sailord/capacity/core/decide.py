"""Decides which machines to ask for and which to delete: events in, commands out, no clock.

The planner chooses how many machines of each pool there should be; this moves towards it one ask
at a time for each pool. Four things hold whatever happens:

1. an ask is sent once; one whose fate is unknown counts as made until looking says otherwise;
2. only machines that carry a request id are ever deleted, by their unique number;
3. nothing is asked for whose price is unknown, that a quota or a budget forbids, or that rests;
4. what more there is than wanted goes, first what the job does not stand on; the rest of it once
   all that is wanted is there, or as far as its cost stands in the way of that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import assert_never

from sailord.capacity.core.budget import (
    has_money_for,
    spent_usd,
    stop_due,
    usd_per_hour,
    usd_per_hour_most,
)
from sailord.capacity.core.model import (
    AgentsCounted,
    Answered,
    Books,
    Capacity,
    Command,
    Create,
    Delete,
    DeletionAnswered,
    Drain,
    Event,
    Machine,
    Observed,
    Outstanding,
    Passed,
    Priced,
    QuotasRead,
    Rest,
    Say,
    SteppedDown,
    StopWork,
    Targeted,
    TookOver,
    request_id_of,
)
from sailord.capacity.core.reconcile import adopt, look
from sailord.providers.interface import (
    Ask,
    Granted,
    InDoubt,
    Outcome,
    Pool,
    RefusalKind,
    Refused,
)

Decision = tuple[Capacity, tuple[Command, ...]]


def decide(state: Capacity, event: Event) -> Decision:
    """Take in what happened; say what is to be done."""
    state, said = _absorb(replace(state, now=max(state.now, event.at)), event)
    if not state.prefix:
        return state, ()
    state, stopped = _keep_budget(state)
    state, doubted = _settle_doubts(state)
    state = _judge_machines(state)
    state, drained = _shrink(state)
    state, deleted = _delete(state)
    state, created = _grow(state)
    return state, (*said, *stopped, *doubted, *drained, *deleted, *created)


def books_of(state: Capacity) -> Books:
    """What the next leader has to know."""
    stopped = state.policy.usd_max if state.stop else None
    asks, machines = tuple(state.asks.values()), tuple(state.machines.values())
    return Books(state.spent_usd, asks, machines, state.stop, stopped)


def supply(state: Capacity) -> Counter[Pool]:
    """Machines that can be counted on, and those that are being made, by pool."""
    found = Counter(m.instance.pool for m in state.machines.values() if m.is_live)
    for asked in state.asks.values():
        found[asked.ask.pool] += asked.ask.count
    return found


def obtainable(state: Capacity, pool: Pool, there: Mapping[Pool, int] | None = None) -> int:
    """How many more machines of a pool could be had now, as far as is known.

    Who asks about many pools gives their ``supply`` along.
    """
    rest = state.rests.get(pool)
    if state.quotas is None or pool not in state.prices or state.stop:
        return 0
    if rest is not None and state.now < rest.until:
        return 0
    limits = [q.free_gpus // pool.gpus for q in state.quotas if pool in q.pools]
    most = state.policy.machines_per_pool_max - (there or supply(state)).get(pool, 0)
    return max(min([most, *map(int, limits)]), 0)


def is_out(state: Capacity, pool: Pool, for_s: float) -> bool:
    """Whether a pool had nothing for so long, as far as is known of late.

    One that no price or quota lets be asked has nothing at any time.
    """
    rest, there = state.rests.get(pool), supply(state)[pool]
    if rest is None:
        return not there and not obtainable(state, pool)
    is_recent = state.now <= rest.until + max(for_s, state.policy.look_s)
    return is_recent and rest.kind != "rate" and state.now >= rest.since + for_s


# ---- what happened ------------------------------------------------------------------------------


def _absorb(state: Capacity, event: Event) -> Decision:
    match event:
        case TookOver():
            return _take_over(state, event)
        case SteppedDown():
            return Capacity(state.policy, state.now), ()
        case Observed():
            return look(state, event.observation)
        case Answered():
            return _take_answer(state, event.outcome)
        case DeletionAnswered():
            told = tuple(Say(f"{id_} was not deleted: {w}") for id_, w in
                         sorted(event.deleted.failed.items()))  # fmt: skip
            return state, told
        case Priced():
            return _reprice(state, event.prices), ()
        case QuotasRead():
            return replace(state, quotas=event.quotas), ()
        case AgentsCounted():
            return _count_agents(state, event), ()
        case Targeted():
            return replace(state, target=dict(event.target)), ()
        case Passed():
            return state, ()
        case _:
            assert_never(event)


def _take_over(state: Capacity, event: TookOver) -> Decision:
    """Whatever the last leader asked for may have been made: looking will tell.

    What it wrote it would drain it may not have come to order.
    """
    books = event.books
    asks = {a.ask.request_id: replace(a, is_in_doubt=True) for a in books.asks}
    is_spent = books.stopped_at_usd is not None and books.stopped_at_usd == state.policy.usd_max
    state = Capacity(
        state.policy,
        state.now,
        event.prefix,
        asks=asks,
        machines={m.instance.id: m for m in books.machines},
        spent_usd=books.spent_usd,
        stop=books.stop if is_spent else "",
    )
    return state, tuple(_drain(m) for m in books.machines if m.is_drained and not m.why)


def _take_answer(state: Capacity, outcome: Outcome) -> Decision:
    asked = state.asks.get(outcome.request_id)
    if asked is None:
        return state, ()  # Looking was faster, or it was given up.
    pool, asks = asked.ask.pool, dict(state.asks)
    match outcome:
        case Granted(instances=()):  # They are being made, and nobody can name them yet.
            asks[outcome.request_id] = replace(asked, is_in_doubt=True)
            return replace(state, asks=asks), ()
        case Granted():
            del asks[outcome.request_id]
            for instance in outcome.instances:
                state = adopt(state, instance, asked.usd_per_hour, was_seen=False)
            rests = {p: rest for p, rest in state.rests.items() if p != pool}
            text = f"{len(outcome.instances)} of {asked.ask.count} granted: {pool}"
            return replace(state, asks=asks, rests=rests), (Say(text),)
        case Refused():
            del asks[outcome.request_id]
            state = _let_rest(
                replace(state, asks=asks), pool, outcome.kind, outcome.text, outcome.retry_after_s
            )
            wait_s = state.rests[pool].until - state.now
            text = f"refused ({outcome.kind}): {pool}: {outcome.text}; rests {wait_s:.0f} s"
            return state, (Say(text),)
        case InDoubt():
            asks[outcome.request_id] = replace(asked, is_in_doubt=True)
            text = f"no answer ({outcome.request_id}): {pool}; looking will tell"
            return replace(state, asks=asks), (Say(text),)
        case _:
            assert_never(outcome)


def _let_rest(
    state: Capacity, pool: Pool, kind: RefusalKind, text: str, retry_after_s: float | None = None
) -> Capacity:
    policy, before = state.policy, state.rests.get(pool)
    if before is not None and state.now > before.until + policy.rest_max_s:
        before = None  # It was not asked for long, and its refusals say nothing any more.
    refusals = 1 if before is None else before.refusals + 1
    wait_s = min(policy.rest_s(kind) * 2.0 ** min(refusals - 1, 20), policy.rest_max_s)
    until = state.now + max(wait_s, retry_after_s or 0.0)
    since = state.now if before is None else before.since
    return replace(state, rests={**state.rests, pool: Rest(until, kind, refusals, text, since)})


def _reprice(state: Capacity, prices: Mapping[Pool, float]) -> Capacity:
    """What a machine cost until now stays as it was."""
    machines = {
        id_: _at_price(machine, prices.get(machine.instance.pool), state.now)
        for id_, machine in state.machines.items()
    }
    return replace(state, prices=dict(prices), machines=machines)


def _at_price(machine: Machine, price: float | None, now: float) -> Machine:
    if price is None or price == machine.usd_per_hour or machine.ended_at is not None:
        return machine
    if machine.usd_per_hour is None:
        return replace(machine, usd_per_hour=price)
    since, paid = max(now, machine.priced_from), machine.usd(now)
    return replace(machine, usd_per_hour=price, priced_from=since, paid_usd=paid)


def _count_agents(state: Capacity, event: AgentsCounted) -> Capacity:
    machines = dict(state.machines)
    for id_, machine in state.machines.items():
        name = machine.instance.node
        agent = event.agents.get(name) if name else None
        if agent is None:
            if machine.joined_at is not None:
                machines[id_] = replace(machine, absent_since=machine.absent_since or state.now)
            continue
        machines[id_] = replace(
            machine,
            joined_at=machine.joined_at or state.now,
            absent_since=None,
            is_leaving=agent.is_leaving,
            gpus=agent.gpus,
        )
    return replace(state, machines=machines, in_use=event.in_use, looked_at=state.now)


# ---- what follows -------------------------------------------------------------------------------


def _keep_budget(state: Capacity) -> Decision:
    due = stop_due(state)
    if not due or state.stop in (due, "ended"):
        return state, ()  # Once the work was told to stop it is not told otherwise.
    why = f"${spent_usd(state):,.2f} of the total budget of ${state.policy.usd_max:,.2f} are spent"
    told: tuple[Command, ...] = (Say(f"{why}: nothing more is asked for"),)
    if not state.stop:
        told = (*told, StopWork(why))
    return replace(state, stop=due), told


def _settle_doubts(state: Capacity) -> Decision:
    """What is not seen of an ask for long does not come; where nothing came, its pool rests."""
    told: list[Command] = []
    made = Counter(m.instance.request_id for m in state.machines.values())
    for id_, asked in tuple(state.asks.items()):
        over_at, pool = asked.since + state.policy.doubt_s, asked.ask.pool
        if asked.is_in_doubt and state.observed_at is not None and state.observed_at >= over_at:
            left = {other: each for other, each in state.asks.items() if other != id_}
            state = replace(state, asks=left)
            if made[id_]:
                told.append(Say(f"{id_} made {made[id_]} of {asked.ask.count}: {pool}"))
            else:
                state = _let_rest(state, pool, "unknown", "it was never answered")
                told.append(Say(f"{id_} came to nothing: {pool}"))
    return state, tuple(told)


def _judge_machines(state: Capacity) -> Capacity:
    """Mark the machines that are of no use, whatever is wanted."""
    for id_, machine in tuple(state.machines.items()):
        if machine.why or machine.is_missed or not machine.instance.request_id:
            continue
        fault = _fault_of(state, machine)
        why = fault or _reason_to_part(state, machine)
        if why:
            marked = replace(machine, why=why)
            state = replace(state, machines={**state.machines, id_: marked})
        if fault:
            state = _let_rest(state, machine.instance.pool, "unknown", fault)
    return state


def _fault_of(state: Capacity, machine: Machine) -> str:
    """What is wrong with a machine that its whole pool may share."""
    policy, gpus = state.policy, machine.instance.pool.gpus
    if machine.joined_at is None:
        is_late = state.looked_at >= (machine.running_since or machine.known_since) + policy.boot_s
        return f"no agent registered within {policy.boot_s:.0f} s" if is_late else ""
    if machine.gpus is not None and machine.gpus < gpus:
        return f"it has {machine.gpus} of its {gpus} GPUs"
    return ""


def _reason_to_part(state: Capacity, machine: Machine) -> str:
    # Before the first count nobody knows what the job stands on.
    is_in_use = not state.looked_at or machine.instance.node in state.in_use
    since, lost_s = machine.absent_since, state.policy.lost_s
    if state.stop == "ended" or (state.stop and not is_in_use):
        return "the budget is spent"
    if since is not None and state.looked_at >= since + lost_s:
        return f"its agent is gone for {lost_s:.0f} s"
    return "it was drained" if machine.is_drained and not is_in_use else ""


def _shrink(state: Capacity) -> Decision:
    """Let go what has been more than wanted for a while: unused ones first, the youngest first."""
    live: dict[Pool, list[Machine]] = {}
    for machine in state.machines.values():
        if machine.is_live and machine.instance.request_id:
            live.setdefault(machine.instance.pool, []).append(machine)
    since: dict[Pool, float] = {}
    spare: list[Machine] = []
    machines = dict(state.machines)
    for pool, present in sorted(live.items()):
        too_many = len(present) - state.target.get(pool, 0)
        if too_many <= 0:
            continue
        since[pool] = state.surplus_since.get(pool, state.now)
        if state.now < since[pool] + state.policy.surplus_s:
            continue
        unused = [m for m in present if m.instance.node not in state.in_use]
        unused.sort(key=lambda m: (m.joined_at is not None, -m.instance.created_at))
        for machine in unused[:too_many]:
            machines[machine.instance.id] = replace(machine, why="it is not wanted")
        used = [m for m in present if m.instance.node in state.in_use]
        spare += used[: max(too_many - len(unused), 0)]
    state = replace(state, surplus_since=since, machines=machines)
    leaving = spare if _has_all(state, live) else _in_the_way(state, spare)
    drained = {m.instance.id: replace(m, is_drained=True) for m in leaving}
    return replace(state, machines={**machines, **drained}), tuple(map(_drain, leaving))


def _drain(machine: Machine) -> Drain:
    return Drain(machine.instance.node, f"{machine.instance.pool} is not wanted any more")


def _has_all(state: Capacity, live: Mapping[Pool, list[Machine]]) -> bool:
    """Whether all that is wanted is there: before that the job keeps what it stands on."""
    return all(
        sum(m.joined_at is not None for m in live.get(pool, ())) >= count
        for pool, count in state.target.items()
    )


def _in_the_way(state: Capacity, spare: list[Machine]) -> list[Machine]:
    """Surplus that a budget cannot pay together with what is wanted: no more than must go.

    Otherwise the job would stand on it for ever, and what is wanted would never be asked for.
    """
    most = usd_per_hour_most(state)
    if most is None or not spare:
        return []
    running = [m for m in state.machines.values() if m.ended_at is None]
    room = most - usd_per_hour(state) + sum(m.usd_per_hour or 0.0 for m in running if not m.is_live)
    within_reach = room + sum(m.usd_per_hour or 0.0 for m in spare)
    needed, there = 0.0, supply(state)
    for pool in sorted(state.target, key=lambda pool: state.prices.get(pool, 0.0)):
        for _ in range(min(state.target[pool] - there[pool], obtainable(state, pool, there))):
            if needed + state.prices[pool] <= within_reach:
                needed += state.prices[pool]
    leaving: list[Machine] = []
    for machine in sorted(spare, key=_usd_per_gpu, reverse=True):
        if needed and room < needed:
            leaving.append(machine)
            room += machine.usd_per_hour or 0.0
    return leaving


def _usd_per_gpu(machine: Machine) -> float:
    return (machine.usd_per_hour or 0.0) / max(machine.instance.pool.gpus, 1)


def _delete(state: Capacity) -> Decision:
    """Order the deletion of what is to go, again and again until it is gone."""
    due: list[str] = []
    machines = dict(state.machines)
    for id_, machine in state.machines.items():
        if not machine.why or not machine.instance.request_id:
            continue
        last = machine.deletion_at
        if last is None or state.now >= last + state.policy.delete_again_s:
            due.append(id_)
            machines[id_] = replace(machine, deletion_at=state.now, deletions=machine.deletions + 1)
    if not due:
        return state, ()
    return replace(state, machines=machines), (Delete(tuple(sorted(due))),)


def _grow(state: Capacity) -> Decision:
    """Ask for what is missing: one ask at a time for each pool."""
    if state.stop or state.observed_at is None:
        return state, ()  # Before the first look nobody knows what is there.
    orders: list[Command] = []
    there, busy = supply(state), {asked.ask.pool for asked in state.asks.values()}
    for pool, wanted in sorted(state.target.items()):
        missing = wanted - there[pool]
        if missing <= 0 or pool in busy:
            continue
        count = min(missing, obtainable(state, pool, there), state.policy.machines_per_ask_max)
        if count <= 0:
            continue
        price = state.prices[pool]
        while count and not has_money_for(state, count * price):
            count -= 1
        if not count:
            continue
        number = state.requests + 1
        ask = Ask(request_id_of(state.prefix, number), pool, count)
        asks = {**state.asks, ask.request_id: Outstanding(ask, price, state.now)}
        state = replace(_use_quota(state, pool, count), asks=asks, requests=number)
        orders.append(Create(ask))
    return state, tuple(orders)


def _use_quota(state: Capacity, pool: Pool, count: int) -> Capacity:
    """Until quotas are read again, what was asked for counts as used."""
    quotas = tuple(
        replace(q, used_gpus=q.used_gpus + count * pool.gpus) if pool in q.pools else q
        for q in state.quotas or ()
    )
    return replace(state, quotas=quotas)
