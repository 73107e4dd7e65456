"""Nodes: the machines that are up, by name, and the nodes that a placed plan uses."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from planner.problem.inventory import Lot
from simulator.cluster.cluster import Cluster, Machines, Pool
from simulator.estimate.machine_layout import lay_out
from simulator.inputs.supply_check import groups_by_place
from simulator.spec.plan import Located, Place, PlaceKey, Plan, Stage


@dataclass(frozen=True, slots=True, order=True)
class PlannerNode(Located):
    """One life of one machine; a machine that comes back is another node."""

    id: str
    gpu: str
    machine: str
    zone: str
    gpus: int
    """Devices 0 to ``gpus - 1`` are usable."""
    spot: bool = False


def nodes_of(cluster: Cluster) -> tuple[PlannerNode, ...]:
    """Nodes for a cluster that names none, numbered from 1 in each pool."""
    numbers: Counter[PlaceKey] = Counter()
    nodes = []
    for pool in cluster.pools:
        key = pool.key
        for gpus, count in pool.machines(pool.gpus):
            for _ in range(count):
                numbers[key] += 1
                name = f"{pool.zone}/{pool.machine}/{numbers[key]}"
                nodes.append(PlannerNode(name, *key, gpus, pool.spot))
    return tuple(nodes)


@lru_cache(maxsize=1 << 16)
def natural_order(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts node-10 after node-9."""
    parts: list[str] = [""]
    for letter in name:
        if letter.isdecimal() != parts[-1][-1:].isdecimal() and parts[-1]:
            parts.append("")
        parts[-1] += letter
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


def spot_by_id(nodes: Iterable[PlannerNode]) -> dict[str, bool]:
    """Whether each node is a spot node, by its id: prices follow from it."""
    return {node.id: node.spot for node in nodes}


def cluster_with(cluster: Cluster, nodes: Iterable[PlannerNode]) -> Cluster:
    """The cluster with exactly these nodes up; prices, quotas and links stay."""
    up: defaultdict[tuple[PlaceKey, bool], Counter[int]] = defaultdict(Counter)
    for node in nodes:
        up[node.key, node.spot][node.gpus] += 1
    pools: list[Pool] = []
    for pool in cluster.pools:
        sizes = up.pop((pool.key, pool.spot), Counter())
        # Largest machines first: the machine size of a pool is read from its first entry.
        for size in sorted(sizes, reverse=True):
            pools.append(replace(pool, gpus_per_machine=size, gpus=size * sizes[size]))
        if not sizes:
            pools.append(replace(pool, gpus=0))
    assert not up, f"nodes of no pool: {sorted(up)}"
    return replace(cluster, pools=tuple(pools))


def paid_first(nodes: Iterable[PlannerNode], plan: Plan, *, spot: bool) -> tuple[PlannerNode, ...]:
    """The nodes that supply a plan if those on spot, or else on demand, are taken first.

    The search prices plans in one of these orders.
    """
    wanted = groups_by_place(plan)
    left = Counter({key: sum(tp * n for tp, n in sizes.items()) for key, sizes in wanted.items()})
    taken = []
    for node in sorted(nodes, key=lambda node: node.spot != spot):
        if left[node.key] > 0:
            left[node.key] -= node.gpus
            taken.append(node)
    return tuple(taken)


def lots_on(lots: Sequence[Lot], nodes: Iterable[PlannerNode]) -> tuple[Lot, ...]:
    """The same lots in the same order, with only the GPUs of these nodes."""
    sizes: defaultdict[PlaceKey, Counter[int]] = defaultdict(Counter)
    spot: Counter[PlaceKey] = Counter()
    for node in nodes:
        sizes[node.key][node.gpus] += 1
        spot[node.key] += node.gpus * node.spot
    found = []
    for lot in lots:
        key = lot.key
        machines = tuple(sorted(sizes[key].items()))
        count = sum(size * times for size, times in machines)
        found.append(replace(lot, gpus=count, machines=machines, spot_gpus=spot[key]))
    return tuple(found)


def is_placed(plan: Plan) -> bool:
    """Whether every device group of the plan names its node and devices."""
    return all(
        place.node is not None and place.devices
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for place in stage.places
    )


def nodes_used(plan: Plan) -> frozenset[str]:
    """Ids of the nodes on which a placed plan runs."""
    return frozenset(
        place.node
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for place in stage.places
        if place.node is not None
    )


def placement_of(plan: Plan, machines_of: Callable[[Place, int], Machines]) -> int | None:
    """How a placed plan places its pipelines: one by one, or by the rule of layout.

    One by one if more neighbouring stages share a node than by the rule.
    """

    def shared(one: Plan) -> int:
        layout = lay_out(one, machines_of)
        hops = layout.groups.hops
        return int((layout.node[hops.source] == layout.node[hops.target]).sum())

    pipelines = tuple(replace(p, stages=tuple(map(unplaced, p.stages))) for p in plan.pipelines)
    return 1 if shared(plan) > shared(replace(plan, pipelines=pipelines)) else None


def unplaced(stage: Stage) -> Stage:
    """The stage without its node and devices."""
    return replace(stage, places=tuple(place.without_node for place in stage.places))
