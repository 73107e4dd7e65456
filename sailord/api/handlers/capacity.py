"""Handler of ``/v1/capacity``: rented and wanted instances, refusals, quotas and costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from aiohttp import web

from planner.move_policy.node_lifetimes import LifetimeHistory
from sailord.api.answers.responses import answer
from sailord.api.answers.types import CapacityGlance
from sailord.api.handlers.context import CONTEXT, ApiContext
from sailord.api.handlers.orders import tell_given
from sailord.capacity.core.boots import why_stopped
from sailord.capacity.core.budget import spent_usd, unpriced, usd_left, usd_per_hour
from sailord.capacity.core.cooldowns import cooldown_of
from sailord.capacity.core.deadline_model import DeadlineState
from sailord.capacity.core.model import CapacityState, Cooldown, StopCause
from sailord.capacity.core.planner_view import agents_of
from sailord.capacity.core.rented_instance import RentedInstance
from sailord.capacity.core.supply import obtainable
from sailord.capacity.loop import CapacityLoop
from sailord.core.model.state import State
from sailord.planning.machine_lifetimes import pool_label
from sailord.providers.config import kind_of
from sailord.providers.interface import Pool
from sailord.text.units import duration

ORPHAN_AFTER = 3
"""Deletions ordered before an instance is an orphan; a cloud may take a minute for one."""
MachineState = Literal["awaited", "up", "quarantined", "leaving", "silent", "going", "ended"]


@dataclass(frozen=True, slots=True)
class QuotaView:
    """A quota that the pool draws on, alone or with other pools."""

    name: str
    limit_gpus: float | None
    """Null: unknown."""
    used_gpus: float
    why_unknown: str


@dataclass(frozen=True, slots=True)
class PoolView:
    """Instances of one zone, type and contract: existing and wanted."""

    zone: str
    machine: str
    gpu: str
    gpus: int
    """Of one instance."""
    spot: bool
    usd_per_hour: float | None
    """Of one instance; null: unknown, so none is requested."""
    wanted: int
    up: int
    awaited: int
    """Created; their agents have not registered yet."""
    asked: int
    """Requested; the provider has not answered yet."""
    obtainable: int
    """How many more could be requested now."""
    rest: Cooldown | None
    stopped: str
    """Why no more are requested until an operator orders it; empty: it is not stopped."""
    quotas: tuple[QuotaView, ...]
    life_s: float
    """Expected lifetime of one instance, by recent observations."""
    flex: bool = False
    """Requests wait in a queue of the provider, at no cost."""
    waits_s: float | None = None
    """How long a request has waited there; null: none waits."""


@dataclass(frozen=True, slots=True)
class MachineView:
    """One instance."""

    id: str
    """The provider's unique number."""
    name: str
    node: str
    """The name under which its agent registers; empty while unknown."""
    zone: str
    machine: str
    spot: bool
    state: MachineState
    """``ended``: it was preempted or stopped and is not deleted yet."""
    created_at: float
    usd: float
    """Its cost so far."""
    in_use: bool
    """The job runs on it."""
    rented: bool
    """Rented by sailord, which may therefore delete it."""
    why: str
    """Why it will be deleted; empty: it will not."""


@dataclass(frozen=True, slots=True)
class MoneyView:
    """Costs and budgets."""

    spent_usd: float
    usd_per_hour: float
    """Includes requests that are not answered yet."""
    usd_per_hour_max: float | None
    usd_max: float | None
    usd_left: float | None
    stop: StopCause
    """Of a total budget: whether unused instances, or all, are deleted."""
    unpriced: tuple[str, ...]
    """Instances of unknown price; the sums leave them out."""


@dataclass(frozen=True, slots=True)
class CapacityView:
    """All instances, as the leader knows them; empty on other sailords."""

    provider: str | None
    """Null: no provider is configured, nodes are started by hand."""
    leads: bool
    observed_at: float | None
    """When the provider last listed its instances."""
    pools: tuple[PoolView, ...]
    machines: tuple[MachineView, ...]
    orphans: tuple[str, ...]
    """Rented, not wanted, and still existing after three ordered deletions; they cost money."""
    strangers: tuple[str, ...]
    """Registered nodes that the provider does not list."""
    money: MoneyView
    deadline: str = ""
    """What is rented for the active job's deadline, and why; empty: it has none."""
    why_not_rented: str = ""
    """Why no instance is wanted, if there is no plan for the active job."""


async def show_capacity(request: web.Request) -> web.Response:
    """Show existing, wanted and requested instances, refusals and costs."""
    return answer(capacity_of(request.app[CONTEXT]))


async def retry_capacity(request: web.Request) -> web.Response:
    """Request instances again of pools that were stopped since none brought up an agent."""
    api = request.app[CONTEXT]
    if api.capacity is not None:
        api.capacity.retry_boots()
        tell_given(request, "stopped pools may be rented from again")
    return answer(capacity_of(api), status=202)


def capacity_of(api: ApiContext) -> CapacityView:
    """The view of this sailord."""
    loop, lifetimes = api.capacity, api.cluster.lifetimes
    capacity = CapacityState(api.config.capacity) if loop is None else loop.state
    offered = () if loop is None else loop.provider.pools
    kind = None if api.config.provider is None else kind_of(api.config.provider)
    view = capacity_view(kind, capacity, offered, api.cluster.state, lifetimes)
    return replace(view, why_not_rented=why_not_rented(loop))


def capacity_view(
    kind: str | None,
    capacity: CapacityState,
    offered: Sequence[Pool],
    state: State,
    history: LifetimeHistory,
) -> CapacityView:
    """Build the view."""
    instances = sorted(
        capacity.instances.values(), key=lambda each: (each.instance.pool, each.instance.name)
    )
    asked = Counter[Pool]()
    for each in capacity.asks.values():
        asked[each.ask.pool] += each.ask.count
    names = {each.instance.pool for each in instances}
    # Without a provider, and until the first election, there are no pools to show.
    pools = sorted({*offered, *names, *asked, *capacity.target}) if capacity.prefix else []
    return CapacityView(
        provider=kind,
        leads=state.term is not None,
        observed_at=capacity.observed_at,
        pools=tuple(_pool_view(capacity, pool, asked[pool], history) for pool in pools),
        machines=tuple(_machine_view(capacity, each) for each in instances),
        orphans=tuple(each.instance.name for each in instances if each.deletions >= ORPHAN_AFTER),
        strangers=_strangers(capacity, state),
        money=_money_view(capacity),
        deadline=deadline_of(capacity),
    )


def why_not_rented(loop: CapacityLoop | None) -> str:
    """Why no instance is wanted; empty while some are, though the last answer had no plan."""
    return "" if loop is None or any(loop.state.target.values()) else loop.why_not_rented


def deadline_of(capacity: CapacityState, job: str | None = None) -> str:
    """What is rented for a deadline and why: of this job, or of the active one."""
    pace = _pace_of(capacity)
    return pace.why if pace is not None and job in (None, pace.job) else ""


def _pace_of(capacity: CapacityState) -> DeadlineState | None:
    """How the active job's deadline is kept; ``None``: it has none, or that is not known yet."""
    pace, progress = capacity.pace, capacity.progress
    is_known = pace is not None and progress is not None and pace.job == progress.job
    return pace if is_known and capacity.options is not None else None


def glance_of(api: ApiContext) -> CapacityGlance | None:
    """The summary for the status; ``None`` without a provider."""
    if api.capacity is None:
        return None
    view, pace = capacity_of(api), _pace_of(api.capacity.state)
    counts = ("wanted", "up", "awaited", "asked")
    return CapacityGlance(
        **{name: sum(getattr(pool, name) for pool in view.pools) for name in counts},
        resting=sum(pool.rest is not None for pool in view.pools),
        stopped=tuple(
            f"{pool.machine} in {pool.zone}: {pool.stopped}" for pool in view.pools if pool.stopped
        ),
        usd_per_hour=view.money.usd_per_hour,
        spent_usd=view.money.spent_usd,
        stop=view.money.stop,
        orphans=view.orphans,
        deadline=view.deadline,
        is_late=pace is not None and pace.is_late,
        why_not_rented=view.why_not_rented,
        rests_until=min((pool.rest.until for pool in view.pools if pool.rest), default=None),
    )


def cooldowns_of(capacity: CapacityState) -> tuple[str, ...]:
    """Return which pools get no request for now, and why, while instances are missing."""
    there = sum(each.ended_at is None for each in capacity.instances.values())
    if there >= sum(capacity.target.values()):
        return ()
    rests = (
        (rest.until, pool, rest)
        for pool in {*capacity.cooldowns, *capacity.target}
        if (rest := cooldown_of(capacity, pool)) is not None
    )
    return tuple(
        f"{pool.machine} in {pool.zone}{' (spot)' * pool.spot} gets no request for "
        f"{duration(until - capacity.now)} ({rest.kind}): {rest.text}"
        for until, pool, rest in sorted(rests)
    )


def _pool_view(
    capacity: CapacityState, pool: Pool, asked: int, history: LifetimeHistory
) -> PoolView:
    here = [_state_of(each) for each in capacity.instances.values() if each.instance.pool == pool]
    waits = [
        capacity.now - (each.queued_since or capacity.now)
        for each in capacity.asks.values()
        if each.ask.pool == pool and each.is_queued
    ]
    quotas = [quota for quota in capacity.quotas or () if pool in quota.pools]
    life = history.record(pool_label(pool.gpu, pool.zone, is_spot=pool.spot), capacity.now)
    return PoolView(
        **asdict(pool),
        usd_per_hour=capacity.prices.get(pool),
        wanted=capacity.target.get(pool, 0),
        up=here.count("up"),
        awaited=here.count("awaited"),
        asked=asked,
        obtainable=obtainable(capacity, pool),
        rest=cooldown_of(capacity, pool),
        stopped=why_stopped(capacity, pool),
        quotas=tuple(QuotaView(q.name, q.limit_gpus, q.used_gpus, q.why_unknown) for q in quotas),
        life_s=life.node_life_s,
        waits_s=max(waits, default=None),
    )


def _state_of(rented: RentedInstance) -> MachineState:
    if rented.ended_at is not None:
        return "ended"
    if rented.why:
        return "going"
    if rented.is_leaving or rented.is_drained:
        return "leaving"
    if rented.absent_since is not None:
        return "silent"
    if rented.is_out:
        return "quarantined"
    return "up" if rented.joined_at is not None else "awaited"


def _machine_view(capacity: CapacityState, rented: RentedInstance) -> MachineView:
    instance, pool = rented.instance, rented.instance.pool
    return MachineView(
        id=instance.id,
        name=instance.name,
        node=instance.node,
        zone=pool.zone,
        machine=pool.machine,
        spot=pool.spot,
        state=_state_of(rented),
        created_at=instance.created_at,
        usd=rented.usd(capacity.now),
        in_use=instance.node in capacity.in_use,
        rented=bool(instance.request_id),
        why=rented.why,
    )


def _strangers(capacity: CapacityState, state: State) -> tuple[str, ...]:
    if capacity.observed_at is None:
        return ()  # Before the provider has listed its instances, every node would be a stranger.
    known = {each.instance.node for each in capacity.instances.values()}
    agents, _ = agents_of(state)
    return tuple(sorted(name for name in agents if name not in known))


def _money_view(capacity: CapacityState) -> MoneyView:
    policy = capacity.policy
    return MoneyView(
        spent_usd=spent_usd(capacity),
        usd_per_hour=usd_per_hour(capacity),
        usd_per_hour_max=policy.usd_per_hour_max,
        usd_max=policy.usd_max,
        usd_left=usd_left(capacity),
        stop=capacity.stop,
        unpriced=unpriced(capacity),
    )
