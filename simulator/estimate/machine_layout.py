"""Assign each device group of a plan to a machine.

A plan that names no nodes is laid out as Megatron lays out its ranks: in each pool all replicas
of the first stage side by side, then those of the second, machine after machine. Pipelines are
ordered by their contents, so that their order in the plan does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from simulator.arrays import Ints
from simulator.estimate.device_groups import DeviceGroups, GroupId
from simulator.spec.plan import Place, Plan

MachineId = tuple[str, str, str, str | int]
"""(zone, machine type, GPU kind, name or number)."""
PoolKey = tuple[str, str, str]
"""(zone, machine type, GPU kind)."""


@dataclass(frozen=True, eq=False)
class MachineLayout:
    """The machine of each device group of a plan."""

    groups: DeviceGroups
    node: Ints
    """Each group's index into ``nodes``."""
    nodes: tuple[MachineId, ...]

    @cached_property
    def node_of(self) -> dict[GroupId, MachineId]:
        """The machine of each group by its id."""
        found = (self.nodes[number] for number in self.node.tolist())
        return dict(zip(self.groups.ids, found, strict=True))

    def same_node(self, one: GroupId, other: GroupId) -> bool:
        return self.node_of[one] == self.node_of[other]


def lay_out(plan: Plan, gpus_per_machine: Callable[[Place], int]) -> MachineLayout:
    """Assign each device group the machine that the plan names, else the next free one."""
    groups = DeviceGroups.of(plan)
    node = np.empty(len(groups), dtype=np.int64)
    nodes: dict[MachineId, int] = {}
    pools: dict[PoolKey, int] = {}
    # For places with a node, -1 - node; for the others, the number of their pool.
    goes_to = np.empty(len(groups.places), dtype=np.int64)
    for number, place in enumerate(groups.places):
        pool = (place.zone, place.machine, place.gpu)
        if place.node is not None:
            goes_to[number] = -1 - nodes.setdefault((*pool, place.node), len(nodes))
        else:
            goes_to[number] = pools.setdefault(pool, len(pools))
    owning = groups.owning
    goal = goes_to[groups.place[owning]]
    node[owning] = -1 - goal
    order = _queue(groups, owning[goal >= 0], goal[goal >= 0])
    for pool, number in pools.items():
        queue = order[goes_to[groups.place[order]] == number]
        size = gpus_per_machine(Place(pool[2], pool[1], pool[0]))
        machines = _machines(groups.tp[queue], size)
        node[queue] = len(nodes) + machines
        for machine in range(int(machines.max()) + 1):
            nodes[*pool, machine] = len(nodes)
    return MachineLayout(groups, node[groups.owner], tuple(nodes))


def _queue(groups: DeviceGroups, rows: Ints, pool: Ints) -> Ints:
    """Sort the rows by pool, and within it in the order in which they take machines."""
    rank = np.array(_canonical_ranks(groups))[groups.pipeline[rows]]
    # Larger groups first, so that the rest of a machine still fits smaller ones.
    order = np.lexsort((groups.index[rows], rank, -groups.tp[rows], groups.stage[rows], pool))
    queue: Ints = rows[order]
    return queue


def _machines(tp: Ints, size: int) -> Ints:
    """Return the machine number of each group, given the groups' devices in order."""
    if (tp == tp[0]).all():
        numbers: Ints = np.arange(len(tp)) // max(1, size // int(tp[0]))
        return numbers
    found, number, free = [], -1, 0
    for devices in tp.tolist():
        if devices > free:
            number, free = number + 1, size
        free -= devices
        found.append(number)
    return np.array(found)


def _canonical_ranks(groups: DeviceGroups) -> list[int]:
    """Rank pipelines by their contents; equal ones share a rank."""
    plan = groups.plan
    in_order = sorted(range(len(groups.places)), key=lambda n: _place_key(groups.places[n]))
    place_rank = np.empty(len(in_order), dtype=np.int64)
    place_rank[in_order] = np.arange(len(in_order))
    columns = (
        groups.first,
        groups.end,
        groups.tp,
        1 - groups.recompute,
        _split_rank(groups),
        place_rank[groups.place],
    )
    flat = np.stack(columns, axis=1).reshape(-1).tolist()
    width = len(columns)
    keys = [
        (pipeline.micro_batches, *flat[width * begin : width * end])
        for pipeline, (begin, end) in zip(plan.pipelines, groups.blocks, strict=True)
    ]
    order = {key: number for number, key in enumerate(sorted(set(keys)))}
    return [order[key] for key in keys]


def _split_rank(groups: DeviceGroups) -> Ints:
    """Number the splits of the groups' stages."""
    if all(groups.is_chain):
        return np.zeros(len(groups), dtype=np.int64)
    splits = [groups.plan.pipelines[p].stages[s].split for p, s, _ in groups.ids]
    ranks = {split: number for number, split in enumerate(sorted(set(splits)))}
    return np.array([ranks[split] for split in splits])


def _place_key(place: Place) -> tuple[object, ...]:
    return (place.zone, place.machine, place.gpu, place.node or "", place.devices)
