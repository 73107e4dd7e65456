"""Converts between the cluster's state, the capacity decisions and the planner's questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from agents.protocol.records import NodeId
from sailord.capacity.core.decide import obtainable, supply
from sailord.capacity.core.model import Agent, CapacityState
from sailord.core.model.phases import Opening, Stopping
from sailord.core.model.proposal import Proposal
from sailord.core.model.state import State
from sailord.planning.messages import PoolSupply
from sailord.providers.interface import Pool


def agents_of(state: State) -> tuple[Mapping[str, Agent], frozenset[str]]:
    """Return present agents by node name, and the names of the nodes that the job uses."""
    agents = {
        node.record.name: Agent(
            node.record.gpus,
            node.is_draining or node.record.leaves_at is not None,
        )
        for node in state.nodes.values()
        if not node.is_lost and node.absent_since is None
    }
    active = state.active
    if state.unreadable:
        return agents, frozenset(agents)  # A job that cannot be read may use any of them.
    if active is None:
        return agents, frozenset()
    members: set[NodeId] = set()
    if active.generation is not None and active.generation.state != "closed":
        members.update(active.generation.members)
    match active.phase:
        case Opening(proposal=proposal) | Stopping(then=Proposal() as proposal):
            members.update(proposal.members)
        case _:
            pass
    names = {id_: node.record.name for id_, node in state.nodes.items()}
    return agents, frozenset(names[id_] for id_ in members if id_ in names)


def pool_supplies(
    capacity: CapacityState, offered: Sequence[Pool], state: State
) -> tuple[PoolSupply, ...]:
    """Return each pool's supply: up or requested, available, and nodes that are not rented."""
    there = supply(capacity)
    rented = {machine.instance.node for machine in capacity.machines.values()}
    others: Counter[Pool] = Counter()
    for node in state.nodes.values():
        record = node.record
        is_useful = not node.is_lost and not node.is_draining and not node.is_closed_to_new_plans
        if is_useful and record.gpus and record.name not in rented:
            pool = Pool(record.zone, record.machine, record.gpu, record.gpus, record.spot)
            others[pool] += 1
    pools = sorted({*offered, *there, *others})
    return tuple(
        PoolSupply(
            pool.zone,
            pool.machine,
            pool.gpu,
            pool.gpus,
            pool.spot,
            there[pool] + others[pool],
            obtainable(capacity, pool, there) if pool in offered else 0,
            capacity.prices.get(pool),
            others[pool],
        )
        for pool in pools
        if there[pool] + others[pool] or pool in offered
    )


def target_of(
    offered: Sequence[Pool], pools: Sequence[PoolSupply], counts: Sequence[int]
) -> dict[Pool, int]:
    """Return the planner's answer as a target, restricted to pools of the provider."""
    found = {}
    for wanted, count in zip(pools, counts, strict=True):
        pool = Pool(wanted.zone, wanted.machine, wanted.gpu, wanted.gpus, wanted.spot)
        if pool in offered:
            found[pool] = max(count - wanted.unrented, 0)
    return found
