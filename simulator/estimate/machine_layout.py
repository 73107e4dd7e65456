"""Assigns each device group of a plan to a machine.

A plan that names no nodes is laid out as Megatron lays out its ranks: in each pool all replicas
of the first stage side by side, then those of the second, machine after machine. A plan may say how
many pipelines do so together (``Plan.together``): the stages of these take machines first, then
those of the next ones. Pipelines are ordered by their contents, so that their order in the plan
does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat

import numpy as np

from simulator.arrays import Ints
from simulator.cluster.cluster import Machines
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


def lay_out(plan: Plan, machines_of: Callable[[Place, int], Machines]) -> MachineLayout:
    """Assign each device group the machine that the plan names, else the next free one.

    ``machines_of`` returns the machines that a number of GPUs of a place take, in this order.
    """
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
        tp = groups.tp[queue]
        sizes = machines_of(Place(pool[2], pool[1], pool[0]), int(tp.sum()))
        machines = _machines(tp, sizes, in_turn=plan.together is None)
        node[queue] = len(nodes) + machines
        for machine in range(int(machines.max()) + 1):
            nodes[*pool, machine] = len(nodes)
    return MachineLayout(groups, node[groups.owner], tuple(nodes))


def _queue(groups: DeviceGroups, rows: Ints, pool: Ints) -> Ints:
    """Sort the rows by pool, and within it in the order in which they take machines."""
    ranks, blocks = _canonical_ranks(groups)
    pipeline = groups.pipeline[rows]
    rank, block = np.array(ranks)[pipeline], np.array(blocks)[pipeline]
    # Larger groups first, so that the rest of a machine still fits smaller ones.
    keys = (groups.index[rows], rank, -groups.tp[rows], groups.stage[rows], block, pool)
    queue: Ints = rows[np.lexsort(keys)]
    return queue


def _machines(tp: Ints, machines: Machines, *, in_turn: bool) -> Ints:
    """Return the machine number of each group, given the groups' devices in order.

    Groups for which the machines have no room take further ones of the largest size. ``in_turn``
    leaves a machine for good once a group does not fit; otherwise a group takes the first machine
    with room, so that pipelines side by side need no more machines than there are.
    """
    largest = max(int(tp.max()), *(size for size, _ in machines))
    if (tp == tp[0]).all():
        each = int(tp[0])
        if all(size == largest for size, _ in machines):
            numbers: Ints = np.arange(len(tp)) // (largest // each)
            return numbers
        rooms = [(size // each, min(count, len(tp))) for size, count in machines]
        rooms.append((largest // each, len(tp)))
        room = np.repeat([room for room, _ in rooms], [count for _, count in rooms])
        return np.repeat(np.arange(len(room)), room)[: len(tp)]
    sizes = chain(*(repeat(size, count) for size, count in machines), repeat(largest))
    found: list[int] = []
    free: list[int] = []
    # By number of devices, the first machine that may have room for them.
    first: dict[int, int] = {}
    for devices in tp.tolist():
        number = max(0, len(free) - 1) if in_turn else first.get(devices, 0)
        while number == len(free) or free[number] < devices:
            if number == len(free):
                free.append(next(sizes))
            else:
                number += 1
        first[devices] = number
        free[number] -= devices
        found.append(number)
    return np.array(found)


def _canonical_ranks(groups: DeviceGroups) -> tuple[list[int], list[int]]:
    """Rank pipelines by their contents; equal ones share a rank.

    Also number the blocks of pipelines that take machines together: their stages are equal.
    """
    plan = groups.plan
    in_order = sorted(range(len(groups.places)), key=lambda n: _place_key(groups.places[n]))
    place_rank = np.empty(len(in_order), dtype=np.int64)
    place_rank[in_order] = np.arange(len(in_order))
    columns = (
        groups.first,
        groups.end,
        groups.tp,
        groups.end - groups.kept_from,
        _split_rank(groups),
        place_rank[groups.place],
    )
    flat = np.stack(columns, axis=1).reshape(-1).tolist()
    width = len(columns)
    keys = [
        (pipeline.micro_batches, plan.size_of(pipeline), *flat[width * begin : width * end])
        for pipeline, (begin, end) in zip(plan.pipelines, groups.blocks, strict=True)
    ]
    order = {key: number for number, key in enumerate(sorted(set(keys)))}
    ranks = [order[key] for key in keys]
    return ranks, _blocks(ranks, [key[2:] for key in keys], plan.together)


def _blocks(ranks: list[int], stages: list[tuple[int, ...]], together: int | None) -> list[int]:
    """Return each pipeline's block: up to ``together`` with equal stages, in order of rank."""
    if together is None:
        return [0] * len(ranks)
    blocks, number = [0] * len(ranks), -1
    last: tuple[int, ...] | None = None
    taken = 0
    for p in sorted(range(len(ranks)), key=lambda p: (stages[p], ranks[p])):
        if stages[p] != last or taken == together:
            number, taken, last = number + 1, 0, stages[p]
        taken += 1
        blocks[p] = number
    return blocks


def _split_rank(groups: DeviceGroups) -> Ints:
    """Number the splits of the groups' stages."""
    if all(groups.is_chain):
        return np.zeros(len(groups), dtype=np.int64)
    splits = [groups.plan.pipelines[p].stages[s].split for p, s, _ in groups.ids]
    ranks = {split: number for number, split in enumerate(sorted(set(splits)))}
    return np.array([ranks[split] for split in splits])


def _place_key(place: Place) -> tuple[object, ...]:
    return (place.zone, place.machine, place.gpu, place.node or "", place.devices)
