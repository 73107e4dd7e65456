"""What the API says of machines that are rented: what is there, wanted, on its way, and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aiohttp import web

from planner.move_policy.node_lifetimes import History
from sailord.api.app import API, Api, answer
from sailord.api.types import CapacityGlance
from sailord.capacity.core.budget import spent_usd, unpriced, usd_left, usd_per_hour
from sailord.capacity.core.decide import obtainable
from sailord.capacity.core.model import CapacityState, RentedInstance, Stop
from sailord.capacity.core.planner_view import agents_of
from sailord.core.state import State
from sailord.planning.machine_lifetimes import pool_label
from sailord.providers.config import kind_of
from sailord.providers.interface import Pool, RefusalKind

ORPHAN_AFTER = 3
"""Orders to delete it; a cloud may need a minute for the first."""
MachineState = Literal["awaited", "up", "leaving", "silent", "going", "ended"]


@dataclass(frozen=True, slots=True)
class RestView:
    """Why a pool is not asked now, and until when."""

    kind: RefusalKind
    since: float
    """When the first of the refusals came."""
    until: float
    refusals: int
    """Since something was last had there."""
    text: str


@dataclass(frozen=True, slots=True)
class QuotaView:
    """One limit that a pool draws on, alone or with others."""

    name: str
    limit_gpus: float
    used_gpus: float


@dataclass(frozen=True, slots=True)
class PoolView:
    """Machines of one zone, type and contract: how many there are, and how many there should be."""

    zone: str
    machine: str
    gpu: str
    gpus: int
    """Of one machine."""
    spot: bool
    usd_per_hour: float | None
    """Of one machine; null: nobody knows it, and none is ever asked for."""
    wanted: int
    up: int
    awaited: int
    """Made, and their agents have not registered yet."""
    asked: int
    """Asked for, and not answered yet."""
    obtainable: int
    """How many more could be asked for now."""
    rest: RestView | None
    quotas: tuple[QuotaView, ...]
    life_s: float
    """How long one of them lives, by what was seen of late."""


@dataclass(frozen=True, slots=True)
class MachineView:
    """One machine."""

    id: str
    """The provider's unique number."""
    name: str
    node: str
    """The name that its agent registers under; empty while unknown."""
    zone: str
    machine: str
    spot: bool
    state: MachineState
    """``ended``: it was taken, and still stands there."""
    created_at: float
    usd: float
    """What it has cost."""
    in_use: bool
    """The job stands on it."""
    rented: bool
    """It was asked for, and so it may be deleted."""
    why: str
    """Why it is to go."""


@dataclass(frozen=True, slots=True)
class MoneyView:
    """What machines cost, and what they may cost."""

    spent_usd: float
    usd_per_hour: float
    """Asks that are not answered yet among it."""
    usd_per_hour_max: float | None
    usd_max: float | None
    usd_left: float | None
    stop: Stop
    """Of a total budget: what is unused goes, or everything."""
    unpriced: tuple[str, ...]
    """Machines whose price nobody knows: what they cost is in no sum."""


@dataclass(frozen=True, slots=True)
class CapacityView:
    """Everything that is known of machines; as the leader knows it, and empty elsewhere."""

    provider: str | None
    """Null: machines come by themselves."""
    leads: bool
    observed_at: float | None
    """When the provider was last seen."""
    pools: tuple[PoolView, ...]
    machines: tuple[MachineView, ...]
    orphans: tuple[str, ...]
    """Rented, wanted by nobody, and still there though their deletion was ordered three times."""
    strangers: tuple[str, ...]
    """Nodes that registered and that the provider does not know."""
    money: MoneyView


async def show_capacity(request: web.Request) -> web.Response:
    """Machines that are there, wanted and on their way, and why others are not."""
    return answer(capacity_of(request.app[API]))


def capacity_of(api: Api) -> CapacityView:
    """The view of this sailord's own knowledge."""
    procurer, shell = api.procurer, api.shell
    capacity = CapacityState(api.config.capacity) if procurer is None else procurer.state
    offered = () if procurer is None else procurer.provider.pools
    kind = None if api.config.provider is None else kind_of(api.config.provider)
    return capacity_view(kind, capacity, offered, shell.state, shell.observed.history)


def capacity_view(
    kind: str | None,
    capacity: CapacityState,
    offered: Sequence[Pool],
    state: State,
    history: History,
) -> CapacityView:
    """What is known, in the form that everybody reads."""
    machines = sorted(capacity.machines.values(), key=lambda m: (m.instance.pool, m.instance.name))
    asked = Counter[Pool]()
    for each in capacity.asks.values():
        asked[each.ask.pool] += each.ask.count
    names = {machine.instance.pool for machine in machines}
    # A person who has no provider sees no pools, and one whose sailord does not lead sees none yet.
    pools = sorted({*offered, *names, *asked, *capacity.target}) if capacity.prefix else []
    return CapacityView(
        provider=kind,
        leads=state.term is not None,
        observed_at=capacity.observed_at,
        pools=tuple(_pool_view(capacity, pool, asked[pool], history) for pool in pools),
        machines=tuple(_machine_view(capacity, machine) for machine in machines),
        orphans=tuple(m.instance.name for m in machines if m.deletions >= ORPHAN_AFTER),
        strangers=_strangers(capacity, state),
        money=_money_view(capacity),
    )


def glance_of(api: Api) -> CapacityGlance | None:
    """What a status says of machines; nothing where nobody provides them."""
    if api.procurer is None:
        return None
    view = capacity_of(api)
    return CapacityGlance(
        wanted=sum(pool.wanted for pool in view.pools),
        up=sum(pool.up for pool in view.pools),
        awaited=sum(pool.awaited for pool in view.pools),
        asked=sum(pool.asked for pool in view.pools),
        resting=sum(pool.rest is not None for pool in view.pools),
        usd_per_hour=view.money.usd_per_hour,
        spent_usd=view.money.spent_usd,
        stop=view.money.stop,
        orphans=view.orphans,
    )


def _pool_view(capacity: CapacityState, pool: Pool, asked: int, history: History) -> PoolView:
    here = [_state_of(m) for m in capacity.machines.values() if m.instance.pool == pool]
    rest = capacity.cooldowns.get(pool)
    quotas = [quota for quota in capacity.quotas or () if pool in quota.pools]
    life = history.record(pool_label(pool.gpu, pool.zone, is_spot=pool.spot), capacity.now)
    return PoolView(
        zone=pool.zone,
        machine=pool.machine,
        gpu=pool.gpu,
        gpus=pool.gpus,
        spot=pool.spot,
        usd_per_hour=capacity.prices.get(pool),
        wanted=capacity.target.get(pool, 0),
        up=here.count("up"),
        awaited=here.count("awaited"),
        asked=asked,
        obtainable=obtainable(capacity, pool),
        rest=None
        if rest is None or capacity.now >= rest.until
        else RestView(rest.kind, rest.since, rest.until, rest.refusals, rest.text),
        quotas=tuple(QuotaView(q.name, q.limit_gpus, q.used_gpus) for q in quotas),
        life_s=life.node_life_s,
    )


def _state_of(machine: RentedInstance) -> MachineState:
    if machine.ended_at is not None:
        return "ended"
    if machine.why:
        return "going"
    if machine.is_leaving or machine.is_drained:
        return "leaving"
    if machine.absent_since is not None:
        return "silent"
    return "up" if machine.joined_at is not None else "awaited"


def _machine_view(capacity: CapacityState, machine: RentedInstance) -> MachineView:
    instance, pool = machine.instance, machine.instance.pool
    return MachineView(
        id=instance.id,
        name=instance.name,
        node=instance.node,
        zone=pool.zone,
        machine=pool.machine,
        spot=pool.spot,
        state=_state_of(machine),
        created_at=instance.created_at,
        usd=machine.usd(capacity.now),
        in_use=instance.node in capacity.in_use,
        rented=bool(instance.request_id),
        why=machine.why,
    )


def _strangers(capacity: CapacityState, state: State) -> tuple[str, ...]:
    if capacity.observed_at is None:
        return ()  # Before the first look everybody would be one.
    known = {machine.instance.node for machine in capacity.machines.values()}
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
