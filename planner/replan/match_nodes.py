"""Matches the nodes that a plan ran on with the machines of a cluster file, which names none."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from planner.replan.nodes import (
    PlannerNode,
    is_placed,
    natural_order,
    nodes_of,
    spot_by_id,
)
from simulator.cluster.cluster import Cluster, Pool
from simulator.documents.problems import InputError, Problems, nearest
from simulator.spec.plan import Place, PlaceKey, Plan


@dataclass(frozen=True, slots=True)
class MatchedNodes:
    """The nodes before and after a change; a node in both stayed up."""

    before: tuple[PlannerNode, ...]
    now: tuple[PlannerNode, ...]

    @property
    def lost(self) -> tuple[str, ...]:
        """Ids of the nodes that are no longer up."""
        return tuple(sorted({node.id for node in self.before} - {node.id for node in self.now}))

    @property
    def unused(self) -> tuple[str, ...]:
        """Ids of the nodes that are up and that the plan did not use."""
        return tuple(sorted({node.id for node in self.now} - {node.id for node in self.before}))


def match_nodes(plan: Plan, cluster: Cluster, lost: Iterable[str] = ()) -> MatchedNodes:
    """Match the machines that are up with the nodes that a plan names.

    The plan's nodes, except those in ``lost``, keep their names for as many machines as are up; if
    there are fewer machines, the last names count as lost. A plan that names no nodes ran on the
    first machines of each pool. Lost nodes were spot nodes where their place has a spot pool.
    """
    problems = Problems()
    gone = set(lost)
    named = _read_names(plan, problems)
    for name in sorted(gone - named.keys()):
        if is_placed(plan):
            problems.add("--lost", f'no stage runs on "{name}"', nearest(name, named))
        else:
            problems.add(
                "--lost",
                f'"{name}" is unknown: the plan names no nodes',
                "name its nodes in the plan",
            )
    problems.raise_if_any()
    up: defaultdict[PlaceKey, list[PlannerNode]] = defaultdict(list)
    for node in nodes_of(cluster):
        up[node.key].append(node)
    spot = {pool.key for pool in cluster.pools if pool.spot}
    if not is_placed(plan):
        return _match_by_count(plan, cluster, up, spot)
    before, now = [], []
    names: defaultdict[PlaceKey, list[str]] = defaultdict(list)
    for name in sorted(named, key=natural_order):
        place, devices = named[name]
        key = place.key
        size = max([devices, *(node.gpus for node in up[key])])
        before.append(PlannerNode(name, *key, size, key in spot))
        if name not in gone:
            names[key].append(name)
    for key, machines in sorted(up.items()):
        # Nodes that need more devices get the larger machines.
        largest_first = sorted(machines, key=lambda node: -node.gpus)
        kept = sorted(names[key][: len(machines)], key=lambda name: -named[name][1])
        now += [replace(m, id=name) for m, name in zip(largest_first, kept, strict=False)]
        fresh = _fresh_names(key, named)
        now += [replace(m, id=next(fresh)) for m in largest_first[len(kept) :]]
    contract = spot_by_id(now)
    before = [replace(node, spot=contract.get(node.id, node.spot)) for node in before]
    return MatchedNodes(tuple(before), tuple(now))


def with_pools_of(cluster: Cluster, plan: Plan) -> Cluster:
    """The cluster with an empty pool for each place of the plan that the cluster lacks."""
    known = {pool.key for pool in cluster.pools}
    sizes: dict[PlaceKey, int] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for place in stage.places:
                key = place.key
                most = max([stage.tp, *(device + 1 for device in place.devices)])
                with contextlib.suppress(InputError):  # A machine type that the catalogue lacks.
                    most = max(most, cluster.catalogue.machine(place.machine).gpus)
                sizes[key] = max(sizes.get(key, 1), most)
    gone = tuple(
        Pool(zone, gpu, machine, size, 0)
        for (gpu, machine, zone), size in sorted(sizes.items())
        if (gpu, machine, zone) not in known
    )
    return replace(cluster, pools=(*cluster.pools, *gone)) if gone else cluster


def _read_names(plan: Plan, problems: Problems) -> dict[str, tuple[Place, int]]:
    """The nodes that a plan names: their place, and the number of devices that they need."""
    named: dict[str, tuple[Place, int]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for place in stage.places:
                if place.node is None:
                    continue
                unnamed = place.without_node
                known, devices = named.get(place.node, (unnamed, 0))
                if known != unnamed:
                    problems.add(
                        "plan", f"has {place.node} in two places", "give each machine its own name"
                    )
                named[place.node] = (known, max([devices, *(d + 1 for d in place.devices)]))
    if named and not is_placed(plan):
        problems.add("plan", "names nodes or devices for some stages only", "name them for all")
    return named


def _match_by_count(
    plan: Plan,
    cluster: Cluster,
    up: dict[PlaceKey, list[PlannerNode]],
    spot: Collection[PlaceKey],
) -> MatchedNodes:
    """Match by number: before the change there were as many machines as the plan may need."""
    groups: Counter[PlaceKey] = Counter()
    sizes: dict[PlaceKey, int] = {}
    for pipeline in plan.pipelines:
        for stage in plan.owning_stages(pipeline):
            for place in stage.places:
                key = place.key
                groups[key] += 1
                sizes[key] = max(sizes.get(key, 0), stage.tp)
    before: list[PlannerNode] = []
    for key, count in sorted(groups.items()):
        machines = up.get(key, [])
        whole = (pool.gpus_per_machine for pool in cluster.pools if pool.key == key)
        size = max([sizes[key], *whole])
        # A machine that lost GPUs may be too small for the group that ran on it.
        missing = max(0, count - sum(node.gpus >= sizes[key] for node in machines))
        more = (
            PlannerNode(f"{key[2]}/{key[1]}/{number}", *key, size, key in spot)
            for number in range(len(machines) + 1, len(machines) + missing + 1)
        )
        before += [*machines, *more]
    return MatchedNodes(tuple(before), tuple(node for key in sorted(up) for node in up[key]))


def _fresh_names(key: PlaceKey, taken: Collection[str]) -> Iterator[str]:
    """Names in the style of ``nodes_of`` that the plan does not use."""
    for number in itertools.count(1):
        name = f"{key[2]}/{key[1]}/{number}"
        if name not in taken:
            yield name
