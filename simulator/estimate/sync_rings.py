"""All-reduce rings over the holders of each layer, all rings of a plan as numpy columns.

Neighbours in a ring are close: ordered by zone, then by machine. For hierarchical sync, a ring
over several zones also has a ring inside each zone, and one across over each zone's first member.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from simulator.arrays import Ints
from simulator.estimate.device_groups import DeviceGroups, distinct_rows
from simulator.estimate.machine_layout import MachineLayout
from simulator.hardware.runtime_constants import uses_gloo

HopName = tuple[tuple[str, str, str], tuple[str, str, str], int, int, int, int, int]
"""Sender, receiver, and the other columns of ``HopColumn``."""
RingSteps = tuple[tuple[Any, Any, Any], ...]
"""Number of steps, the share of the tensor that each carries, and the parts that it is cut into."""


class HopColumn(IntEnum):
    """The columns of a kind of hop."""

    sender = 0
    receiver = 1
    flows = 2
    rings = 3
    """Rings through the busier of the two machines."""
    zone_rings = 4
    """Rings between the two zones."""
    same_node = 5
    members = 6
    """Members of the ring on the machine that holds fewer of them."""


@dataclass(frozen=True, eq=False)
class RingHops:
    """The distinct kinds of hops of each ring."""

    groups: DeviceGroups
    begin: Ints
    """Per ring, its first entry."""
    end: Ints
    number: Ints
    """Per entry, its index into ``names``; equal kinds of different rings share it."""
    kind: Ints
    """Per entry, the columns of ``HopColumn``."""
    heads: Ints
    """Per number, the columns of ``HopColumn``."""

    @cached_property
    def names(self) -> list[HopName]:
        keys = [place.key for place in self.groups.place_kinds]
        return [(keys[a], keys[b], *rest) for a, b, *rest in self.heads.tolist()]


@dataclass(frozen=True, eq=False)
class SyncRings:
    """All rings of a plan; ``row`` lists the members ring by ring."""

    layout: MachineLayout
    start: Ints
    """Ring r has the members ``start[r]`` to ``start[r + 1]``."""
    ring: Ints
    """The ring of each member."""
    row: Ints

    @classmethod
    def of(cls, layout: MachineLayout, layers: Sequence[int], *, with_union: bool) -> SyncRings:
        """Build a ring over the holders of each of these layers.

        ``with_union`` adds one over the holders of the first or the last layer, for tied tensors.
        """
        groups = layout.groups
        low = np.searchsorted(layers, groups.first)
        high = np.searchsorted(layers, groups.end)
        count = high - low
        rows = np.repeat(np.arange(len(groups)), count)
        begin = np.cumsum(count) - count
        ring = np.repeat(low - begin, count) + np.arange(len(rows))
        if with_union:
            union = np.flatnonzero((groups.first == 0) | (high == len(layers)))
            rows = np.concatenate([rows, union])
            ring = np.concatenate([ring, np.full(len(union), len(layers))])
        order = _ring_order(layout, ring, rows)
        ring, rows = ring[order], rows[order]
        rings = len(layers) + with_union
        return cls(layout, np.searchsorted(ring, np.arange(rings + 1)), ring, rows)

    @property
    def groups(self) -> DeviceGroups:
        return self.layout.groups

    def members(self, ring: int) -> Ints:
        rows: Ints = self.row[self.start[ring] : self.start[ring + 1]]
        return rows

    @cached_property
    def has_gloo(self) -> bool:
        """Whether gloo carries the rings, in the order of the ranks."""
        return _has_gloo(self.groups)

    @cached_property
    def size(self) -> Ints:
        return np.diff(self.start)

    # -- zones ----------------------------------------------------------------------------------

    @cached_property
    def _stretch(self) -> tuple[Ints, Ints]:
        """Begin and end of each run of members in one ring and zone."""
        zone = self.groups.zone[self.row]
        new = (np.diff(self.ring, prepend=-1) != 0) | (np.diff(zone, prepend=-1) != 0)
        begin = np.flatnonzero(new)
        return begin, np.append(begin[1:], len(self.row))

    @cached_property
    def zone_count(self) -> Ints:
        """Number of zones of each ring."""
        return np.bincount(self.ring[self._stretch[0]], minlength=len(self.size))

    @cached_property
    def smallest_zone(self) -> Ints:
        """Members of each ring in the zone with the fewest of them."""
        begin, end = self._stretch
        found = np.full(len(self.size), len(self.row))
        np.minimum.at(found, self.ring[begin], end - begin)
        return found

    @cached_property
    def _members(self) -> Ints:
        """How many members of its ring each member's machine holds, itself included."""
        _, kind = distinct_rows(self.ring, self.layout.node[self.row])
        found: Ints = np.bincount(kind)[kind]
        return found

    @cached_property
    def most_on_a_machine(self) -> Ints:
        """Most members of each ring on one machine."""
        rows, kind = distinct_rows(self.ring, self.layout.node[self.row])
        found = np.zeros(len(self.size), dtype=np.int64)
        np.maximum.at(found, self.ring[rows], np.bincount(kind))
        return found

    # -- hops -----------------------------------------------------------------------------------

    @cached_property
    def around(self) -> RingHops:
        """The hops of the rings over all members."""
        following = np.arange(1, len(self.row) + 1)
        full = self.size > 0
        following[self.start[1:][full] - 1] = self.start[:-1][full]
        return self._hops(np.arange(len(self.row)), following)

    @cached_property
    def across(self) -> RingHops:
        """The hops of the rings across zones, over the first member of each zone."""
        heads = self._stretch[0]
        ring = self.ring[heads]
        start = np.searchsorted(ring, ring, side="left")
        following = np.arange(1, len(heads) + 1)
        is_last = np.append(ring[1:] != ring[:-1], True)
        following[is_last] = start[is_last]
        return self._hops(heads, heads[following])

    def inside(self) -> Iterator[tuple[RingHops, Ints]]:
        """Yield, zone by zone, the hops of the rings inside it and each ring's members there."""
        begin, end = self._stretch
        zone = self.groups.zone[self.row[begin]]
        for number in range(len(self.groups.zones)):
            here = np.flatnonzero(zone == number)
            sizes = np.zeros(len(self.size), dtype=np.int64)
            sizes[self.ring[begin[here]]] = end[here] - begin[here]
            counts = end[here] - begin[here]
            first = np.repeat(begin[here], counts)
            offset = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
            following = first + (offset + 1) % np.repeat(counts, counts)
            yield self._hops(first + offset, following), sizes

    def _hops(self, sender: Ints, receiver: Ints) -> RingHops:
        """Return the distinct kinds of hops between members, ring by ring."""
        apart = sender != receiver  # A ring of one member has no hop.
        sender, receiver = sender[apart], receiver[apart]
        groups = self.groups
        a, b = self.row[sender], self.row[receiver]
        on, between = self._ring_counts
        here, there = self.layout.node[a], self.layout.node[b]
        columns = np.stack(
            [
                groups.place_kind[a],
                groups.place_kind[b],
                np.minimum(groups.tp[a], groups.tp[b]),
                np.maximum(on[here], on[there]),
                between[groups.zone[a], groups.zone[b]],
                (here == there).astype(np.int64),
                np.minimum(self._members[sender], self._members[receiver]),
            ],
            axis=1,
        )
        heads, number = distinct_rows(*columns.T)
        ring = self.ring[sender]
        entries, _ = distinct_rows(ring, number)
        rings = np.arange(len(self.size))
        return RingHops(
            groups,
            np.searchsorted(ring[entries], rings, side="left"),
            np.searchsorted(ring[entries], rings, side="right"),
            number[entries],
            columns[entries],
            columns[heads],
        )

    def flow_counts(self) -> list[int]:
        """Return all numbers of parallel rings that a hop can have, and 1."""
        return sorted({1, *np.unique(self.groups.tp).tolist()})

    @cached_property
    def _ring_counts(self) -> tuple[Ints, Ints]:
        return ring_counts(self.layout)

    # -- egress ---------------------------------------------------------------------------------

    def egress(
        self, ring: int, whole_bytes: float, *, staged: bool
    ) -> tuple[tuple[tuple[str, str], float], ...]:
        """Return the bytes from each zone to the next: 2 (n - 1) / n of the tensor per hop."""
        if self.zone_count[ring] < 2:
            return ()
        members = int(self.zone_count[ring] if staged else self.size[ring])
        each = 2 * (members - 1) / members * whole_bytes
        return tuple((pair, each * count) for pair, count in self._crossings[ring])

    @cached_property
    def _crossings(self) -> dict[int, list[tuple[tuple[str, str], int]]]:
        """The zone changes of each ring: from each of its zones to the next, and back."""
        zones_of: defaultdict[int, list[str]] = defaultdict(list)
        begin, _ = self._stretch
        names = self.groups.zones
        for ring, zone in zip(
            self.ring[begin].tolist(), self.groups.zone[self.row[begin]].tolist(), strict=True
        ):
            zones_of[ring].append(names[zone])
        return {
            ring: sorted((pair, 1) for pair in zip(zones, [*zones[1:], zones[0]], strict=True))
            for ring, zones in zones_of.items()
        }


def ring_steps(fewest: Any, most: Any, *, to_owner: bool, is_gloo: bool) -> RingSteps:
    """Return the steps of a sum around a ring of ``fewest`` to ``most`` members, at the least.

    To one owner NCCL sends a tensor once around the ring, part after part; gloo sums a part of it
    on each member, and the owner gathers them. The numbers may be arrays.
    """
    if not to_owner:
        return ((2 * (fewest - 1), 1.0, most),)
    if not is_gloo:
        return ((1, 1.0, 1),)
    return (fewest - 1, 1.0, most), (1, (fewest - 1) / fewest, 1)


def ring_counts(layout: MachineLayout) -> tuple[Ints, Ints]:
    """Count the rings through each machine and between each pair of zones (at least 1).

    A stage counts as one ring, so that contention depends only on the plan.
    """
    groups = layout.groups
    rows, _ = distinct_rows(layout.node, groups.stage)
    on = np.bincount(layout.node[rows], minlength=len(layout.nodes))
    stands = np.zeros((int(groups.stage.max()) + 1, len(groups.zones)), dtype=np.int64)
    stands[groups.stage, groups.zone] = 1
    between = stands.T @ stands
    np.fill_diagonal(between, 1)
    return on, np.maximum(between, 1)


def _has_gloo(groups: DeviceGroups) -> bool:
    return any(uses_gloo(place.gpu) for place in groups.place_kinds)


def _ring_order(layout: MachineLayout, ring: Ints, rows: Ints) -> Ints:
    """Sort members by ring and machine; machines by their load, and only then by name."""
    groups, nodes = layout.groups, layout.nodes
    if _has_gloo(groups):
        backwards: Ints = np.lexsort((-rows, ring))  # Each rank sends to the one before it.
        return backwards
    on, _ = ring_counts(layout)
    keys = [(*node[:3], count) for node, count in zip(nodes, on.tolist(), strict=True)]
    ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    kind = np.array([ranks[key] for key in keys])
    names = {name: rank for rank, name in enumerate(sorted({str(node[3]) for node in nodes}))}
    name = np.array([names[str(node[3])] for node in nodes])
    node, tp = layout.node[rows], groups.tp[rows]
    held = _held_rank(ring, node, tp)
    order: Ints = np.lexsort((rows, tp, name[node], held, kind[node], ring))
    return order


def _held_rank(ring: Ints, node: Ints, tp: Ints) -> Ints:
    """Rank the sorted TP degrees that each member's machine holds of its ring."""
    _, stand = distinct_rows(ring, node)
    if (tp == tp[0]).all():
        counts: Ints = np.bincount(stand)[stand]
        return counts
    held: defaultdict[int, list[int]] = defaultdict(list)
    for where, degree in sorted(zip(stand.tolist(), tp.tolist(), strict=True)):
        held[where].append(degree)
    ranks = {key: rank for rank, key in enumerate(sorted({tuple(v) for v in held.values()}))}
    return np.array([ranks[tuple(held[where])] for where in stand.tolist()])
