"""Gradient sync: who sums which layers with whom, how long it takes, and what it costs to send.

Every layer is reduced between all device groups that hold it, one per pipeline, as a ring or,
over several zones, first inside each zone and then across. The ranks of a group run their rings
side by side and share their machine's way out. Jobs run in one global order, layers descending,
and a group works on one at a time; the same order in the runtime keeps it free of deadlocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, permutations

from simulator.costs import LayerCosts
from simulator.network import Network
from simulator.placement import GroupId, Layout, Node
from simulator.plan import Place, Plan
from simulator.platform import platform_of

Zones = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Holder:
    """A device group that holds a layer."""

    group: GroupId
    place: Place
    tp: int
    node: Node


@dataclass(frozen=True, slots=True)
class SyncJob:
    """The sum of some layers' gradients over all that hold them."""

    layers: tuple[int, int]
    holders: tuple[GroupId, ...]
    seconds: float
    egress_bytes: tuple[tuple[Zones, float], ...]
    way: str
    """``"ring"``, ``"hierarchical"``, or ``"tied"`` for a tensor that two layers share."""


@dataclass(frozen=True, slots=True)
class _Hop:
    sender: Place
    receiver: Place
    flows: int
    rings: int
    """Rings that pass through the busier of the two machines."""
    zone_rings: int
    """Rings that pass between the two zones."""
    same_node: bool


class GradientSync:
    """Builds the sync jobs of one plan."""

    def __init__(self, plan: Plan, layout: Layout, costs: LayerCosts, network: Network) -> None:
        self.plan, self.layout, self.costs, self.network = plan, layout, costs, network
        fp32 = costs.job.precision == "fp32"
        self.gradient_bytes = 4 if fp32 else costs.runtime.gradient_bytes_16bit
        self.crowds = _Crowds.of(layout)
        self._seconds: dict[object, float] = {}

    def jobs(self, *, per_layer: bool) -> list[SyncJob]:
        """The jobs in their global order: by layer, or by the longest runs with equal holders."""
        jobs: list[SyncJob] = []
        for first, end in reversed(self._segments()):
            holders = self._holders(first)
            if len(holders) < 2:
                continue
            pieces = (
                [(layer, layer + 1) for layer in reversed(range(first, end))]
                if per_layer
                else [(first, end)]
            )
            rings = _Rings.of(holders, self.crowds)
            jobs += [self._job(piece, rings, partial(self._parameters, piece)) for piece in pieces]
        tied = self._tied_job()
        return [*jobs, tied] if tied is not None else jobs

    def _job(
        self, layers: tuple[int, int], rings: _Rings, carried: Callable[[int], float]
    ) -> SyncJob:
        """The faster way to sum what ``carried`` says that each of so many rings carries."""
        parameters = {flows: carried(flows) for flows in {1, *rings.flow_counts()}}
        ring_s = self._ring_seconds(rings.ring, rings.members, parameters)
        way, seconds = "ring", ring_s
        if len(rings.zones) > 1:
            staged_s = self._staged_seconds(rings, parameters)
            if staged_s < ring_s:
                way, seconds = "hierarchical", staged_s
        whole = parameters[1] * self.gradient_bytes
        egress = rings.egress(whole, staged=way != "ring")
        return SyncJob(layers, rings.groups, seconds, egress, way)

    def _parameters(self, layers: tuple[int, int], ways: int) -> float:
        """Parameters of the layers that one of ``ways`` parallel rings carries.

        A tensor that embedding and head share is neither's: it has a job of its own.
        """
        row = self.costs.parameters(ways)
        ends = (layers[0] == 0) + (layers[1] == self.costs.layer_count)
        return float(row[layers[0] : layers[1]].sum()) - ends * self.costs.tied_parameters(ways)

    def _tied_job(self) -> SyncJob | None:
        """A tensor that embedding and head share: summed over the holders of both."""
        if self.costs.tied_parameters(1) == 0:
            return None
        union = {h.group: h for h in self._holders(0) + self._holders(self.costs.layer_count - 1)}
        if len(union) < 2:
            return None
        rings = _Rings.of(list(union.values()), self.crowds)
        return replace(self._job((0, 1), rings, self.costs.tied_parameters), way="tied")

    # -- durations ------------------------------------------------------------------------------

    def _ring_seconds(
        self, hops: Sequence[_Hop], members: int, parameters: Mapping[int, float]
    ) -> float:
        """2 (n - 1) steps, each as slow as the slowest hop of the ring."""
        return 2 * self._steps_seconds(hops, members, parameters, shards=members)

    def _staged_seconds(self, rings: _Rings, parameters: Mapping[int, float]) -> float:
        """Reduce inside each zone, sum the shards across zones, gather inside each zone."""
        smallest = min(len(members) for members in rings.zones.values())
        inside = max(
            self._steps_seconds(rings.inside[zone], len(members), parameters, shards=len(members))
            for zone, members in rings.zones.items()
        )
        # All members of a zone send their shard at once: those of one machine share its way out,
        # and all of them share the way between the zones.
        across = 2 * self._steps_seconds(
            rings.across,
            len(rings.zones),
            parameters,
            shards=len(rings.zones) * smallest,
            abreast=min(rings.members_on_a_machine, smallest),
            rivals=smallest,
        )
        return 2 * inside + across

    def _steps_seconds(
        self,
        hops: Sequence[_Hop],
        members: int,
        parameters: Mapping[int, float],
        *,
        shards: int,
        abreast: int = 1,
        rivals: int = 1,
    ) -> float:
        if members < 2:
            return 0.0
        slowest = max(
            self._hop_seconds(
                hop, parameters[hop.flows] * self.gradient_bytes, shards, abreast, rivals
            )
            for hop in hops
        )
        return (members - 1) * slowest

    def _hop_seconds(
        self, hop: _Hop, rank_bytes: float, shards: int, abreast: int, rivals: int
    ) -> float:
        """One step of a ring over one hop, bucket after bucket."""
        key = (hop, rank_bytes, shards, abreast, rivals)
        found = self._seconds.get(key)
        if found is None:
            bucket = self.costs.runtime.sync_bucket_bytes
            full, rest = divmod(rank_bytes, bucket)
            found = full * self._message_seconds(hop, bucket / shards, abreast, rivals)
            found += self._message_seconds(hop, rest / shards, abreast, rivals)
            self._seconds[key] = found
        return found

    def _message_seconds(self, hop: _Hop, bytes_each: float, abreast: int, rivals: int) -> float:
        if bytes_each <= 0:
            return 0.0
        if hop.same_node:
            # Every rank of the group sends to its counterpart in the next group.
            return self.network.within_node(
                hop.sender, gpus=2 * hop.flows * hop.rings, bytes_each=bytes_each
            )
        efficiency = min(
            platform_of(hop.sender.gpu).ring_efficiency,
            platform_of(hop.receiver.gpu).ring_efficiency,
        )
        seconds = self.network.between_nodes(
            hop.sender,
            hop.receiver,
            flows=hop.flows * hop.rings * abreast,
            bytes_each=bytes_each,
            zone_bytes=hop.flows * hop.zone_rings * rivals * bytes_each,
        )
        return seconds / efficiency

    # -- who holds what -------------------------------------------------------------------------

    def _segments(self) -> list[tuple[int, int]]:
        """The longest runs of layers with the same holders."""
        cuts = sorted(
            {stage.layers[0] for p in self.plan.pipelines for stage in p.stages}
            | {self.costs.layer_count}
        )
        return list(pairwise(cuts))

    def _holders(self, layer: int) -> list[Holder]:
        found = []
        for p, pipeline in enumerate(self.plan.pipelines):
            for s, stage in enumerate(pipeline.stages):
                if stage.layers[0] <= layer < stage.layers[1]:
                    for i, place in enumerate(stage.places):
                        group = (p, s, i)
                        node = self.layout.node_of[group]
                        found.append(Holder(group, place, stage.tp, node))
        return found


@dataclass(frozen=True, slots=True)
class _Crowds:
    """How many different rings share a way, one per stage: shares that depend on the plan alone."""

    on: Mapping[Node, int]
    """Rings through each machine."""
    between: Mapping[Zones, int]
    """Rings that have members in both of two zones."""

    @classmethod
    def of(cls, layout: Layout) -> _Crowds:
        stages_on: defaultdict[Node, set[int]] = defaultdict(set)
        zones_of: defaultdict[int, set[str]] = defaultdict(set)
        for (_, s, _), node in layout.node_of.items():
            stages_on[node].add(s)
            zones_of[s].add(node[0])
        between = Counter(pair for zones in zones_of.values() for pair in permutations(zones, 2))
        return cls({node: len(found) for node, found in stages_on.items()}, between)


def _in_ring_order(holders: Sequence[Holder], crowds: _Crowds) -> list[Holder]:
    """Neighbours in the ring stand close: same zone, then same machine.

    Machines are ordered by what they carry before their names, so that names never matter.
    """
    degrees: defaultdict[Node, list[int]] = defaultdict(list)
    for holder in holders:
        degrees[holder.node].append(holder.tp)

    rank = {
        node: (*node[:3], crowds.on[node], sorted(held), str(node[3]))
        for node, held in degrees.items()
    }
    return sorted(holders, key=lambda holder: (rank[holder.node], holder.tp, holder.group))


@dataclass(frozen=True, slots=True)
class _Rings:
    """The ring over all holders, the rings inside each zone, and the one across zones."""

    ring: tuple[_Hop, ...]
    zones: Mapping[str, tuple[Holder, ...]]
    inside: Mapping[str, tuple[_Hop, ...]]
    across: tuple[_Hop, ...]
    crossings: tuple[Zones, ...]
    """Zone changes of the whole ring, one per hop that crosses."""
    groups: tuple[GroupId, ...]
    members_on_a_machine: int

    @classmethod
    def of(cls, members: Sequence[Holder], crowds: _Crowds) -> _Rings:
        holders = _in_ring_order(members, crowds)
        zones: defaultdict[str, list[Holder]] = defaultdict(list)
        for holder in holders:
            zones[holder.place.zone].append(holder)
        heads = [near[0] for _, near in sorted(zones.items())]
        pairs = _pairs(holders)
        return cls(
            ring=_hops(pairs, crowds),
            zones={zone: tuple(near) for zone, near in sorted(zones.items())},
            inside={zone: _hops(_pairs(near), crowds) for zone, near in sorted(zones.items())},
            across=_hops(_pairs(heads), crowds),
            crossings=tuple(
                (a.place.zone, b.place.zone) for a, b in pairs if a.place.zone != b.place.zone
            ),
            groups=tuple(holder.group for holder in holders),
            members_on_a_machine=max(Counter(holder.node for holder in holders).values()),
        )

    @property
    def members(self) -> int:
        return len(self.groups)

    def flow_counts(self) -> set[int]:
        every = [*self.ring, *self.across]
        for hops in self.inside.values():
            every += hops
        return {hop.flows for hop in every}

    def egress(self, whole_bytes: float, *, staged: bool) -> tuple[tuple[Zones, float], ...]:
        """Bytes that leave each zone for the next one: 2 (n - 1) / n of the tensor per hop."""
        members = len(self.zones) if staged else self.members
        each = 2 * (members - 1) / members * whole_bytes
        names = list(self.zones)
        pairs = (
            [(a, b) for a, b in zip(names, [*names[1:], names[0]], strict=True) if a != b]
            if staged
            else self.crossings
        )
        totals: defaultdict[Zones, float] = defaultdict(float)
        for pair in pairs:
            totals[pair] += each
        return tuple(sorted(totals.items()))


def _pairs(holders: Sequence[Holder]) -> list[tuple[Holder, Holder]]:
    return list(zip(holders, [*holders[1:], holders[0]], strict=True))


def _hops(pairs: Sequence[tuple[Holder, Holder]], crowds: _Crowds) -> tuple[_Hop, ...]:
    """The different kinds of hops of a ring."""
    if len(pairs) < 2:
        return ()
    kinds = {
        (
            a.place,
            b.place,
            min(a.tp, b.tp),
            max(crowds.on[a.node], crowds.on[b.node]),
            crowds.between.get((a.node[0], b.node[0]), 1),
            a.node == b.node,
        )
        for a, b in pairs
    }
    return tuple(_Hop(*kind) for kind in sorted(kinds, key=repr))
