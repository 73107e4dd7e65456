"""Lower bound of gradient synchronisation: no ring over this many pipelines is faster.

Every layer is held by one device group of each pipeline. Their ring, or their staged rings over
zones (not to owners, under ZeRO-1), is at least as slow as its hop into the machine of the group in
question. That hop carries no more flows than the group has ranks, because members on one machine
are adjacent in the ring, the narrowest first. Contention is ignored; it only adds time.

A tensor that embedding and head share is summed last, over all groups that hold either: at least
one of each pipeline, and two of each that has several stages.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.problem.inventory import Lot
from simulator.arrays import Floats, Ints
from simulator.estimate.sync_rings import RingSteps, ring_steps
from simulator.hardware.runtime_constants import uses_gloo
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.network.network import Network
from simulator.spec.plan import Place

PIPELINES_RATIO = 1.04
"""Numbers of pipelines within this ratio are bounded together."""
WAYS_MAX, COARSE_RATIO = 4, 1.3
"""With more links than ``WAYS_MAX``, the coarser ratio is used."""

Hop = tuple[Place, Place]
"""From a machine at one place to a machine at another, or to a neighbour in the same machine."""


@dataclass(slots=True, eq=False)
class SyncBound:
    """Least seconds to synchronise each layer's gradients over the pipelines of a plan."""

    costs: LayerCosts
    network: Network
    lots: Sequence[Lot]
    degrees: Sequence[int]
    per_layer: bool
    """Whether each layer is synchronised by itself, or many layers in one pass."""
    is_free: bool = False
    """Whether pipelines may sum nothing in an iteration: with outer steps, each in its zone."""
    _near: dict[object, Hop] = field(default_factory=dict)
    """The distinct links inside zones."""
    _far: dict[object, Hop] = field(default_factory=dict)
    _by_zone: Counter[str] = field(default_factory=Counter)
    _known: dict[object, Floats] = field(default_factory=dict)
    _sizes: dict[int, tuple[Floats, Ints]] = field(default_factory=dict)
    _transfers: dict[tuple[str, int, float], float] = field(default_factory=dict)
    _known_rates: dict[_Link, tuple[list[float], list[float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for lot in self.lots:
            self._by_zone[lot.zone] += lot.gpus
        for one in self.lots:
            for other in self.lots:
                hops = self._near if one.zone == other.zone else self._far
                hops.setdefault(self._name(one.place, other.place), (one.place, other.place))

    def _name(self, sender: Place, receiver: Place) -> object:
        """A key that is equal for links of equal speed; a large cluster has few distinct ones."""
        # Gloo's rings wait for the way back.
        ways = ((sender, receiver), (receiver, sender))
        return *(self._one_way(*way) for way in ways), sender.gpu, receiver.gpu

    def _one_way(self, sender: Place, receiver: Place) -> object:
        cap = self.network.zone_caps.get((sender.zone, receiver.zone))
        measured = self.network.measured.between
        curves = measured.get(((sender.zone, sender.gpu), (receiver.zone, receiver.gpu)))
        if curves is not None:
            return cap, tuple(sorted(curves.items()))
        catalogue, regions = self.network.catalogue, self.network.zone_regions
        distance = catalogue.distance(sender.zone, receiver.zone, regions)
        return cap, sender.machine, receiver.machine, distance

    def by_layer(
        self, gpu: str, tp: int, fewest: int, most: int, stages: int | None = None
    ) -> Floats:
        """Least seconds per layer for a group of ``tp`` GPUs of a kind, with ``fewest`` to ``most``
        pipelines.

        With ``stages``, that number of stages have groups on the group's machine, and their rings
        leave it and share its NIC; otherwise the group's rings may run inside it.
        """
        return self._by_tensors(gpu, tp, fewest, most, stages)[:-1]

    def tied_s(self, gpu: str, tp: int, fewest: int, most: int, stages: int | None = None) -> float:
        """Least seconds to sum the shared tensor over ``fewest`` to ``most`` groups."""
        return float(self._by_tensors(gpu, tp, fewest, most, stages)[-1])

    @property
    def is_gloo(self) -> bool:
        """Whether a group may run several sums at a time."""
        return any(uses_gloo(lot.gpu) for lot in self.lots)

    @property
    def _tensors(self) -> int:
        """The layers, and the tensor that embedding and head share."""
        return self.costs.layer_count + 1

    def _by_tensors(self, gpu: str, tp: int, fewest: int, most: int, stages: int | None) -> Floats:
        if self.is_free:
            return np.zeros(self._tensors)
        key = ("floor", gpu, tp, fewest, most, stages)
        if key not in self._known:
            ranges = _ranges(fewest, most, self._ratio)
            each = [self._of_range(gpu, tp, low, high, stages) for low, high in ranges]
            self._known[key] = np.min(each, axis=0)
        return self._known[key]

    def _sent(self, size: float, flows: int) -> float:
        """Bytes per flow where ``flows`` flows carry a message between two groups.

        Whole tensors go to at least as many ranks as the narrowest group has.
        """
        return size if self.costs.runtime.sends_whole else size / flows

    def transfer_s(self, gpu: str, tp: int, size: float) -> float:
        """Least seconds of a message of ``size`` bytes from or to a group of a pipeline."""
        key = (gpu, tp, size)
        if key not in self._transfers:
            some = [flows for flows in self.degrees if flows <= tp]
            hops = [*self._near.values(), *self._far.values()]
            found = [
                self.network.between_nodes(*hop, flows=flows, bytes_each=self._sent(size, flows))
                for hop in hops
                if gpu in (hop[0].gpu, hop[1].gpu)
                for flows in some
            ]
            # A hop within a machine needs room for both groups.
            found += [
                self.network.within_node(
                    lot.place, gpus=2 * flows, bytes_each=self._sent(size, flows)
                )
                for lot in self.lots
                if lot.gpu == gpu and tp + min(self.degrees) <= lot.gpus_per_machine
                for flows in some
            ]
            self._transfers[key] = min(found)
        return self._transfers[key]

    def leave_machine_s(
        self, size: float, gpu: str | None = None, other: str | None = None, tp: int | None = None
    ) -> float:
        """Least seconds of a message of ``size`` bytes to another machine.

        From or to a group of at most ``tp`` GPUs of a kind, at the other end a group of another.
        """
        found = [
            self.network.between_nodes(*hop, flows=flows, bytes_each=self._sent(size, flows))
            for hop in [*self._near.values(), *self._far.values()]
            if gpu in (None, hop[0].gpu, hop[1].gpu)
            if other is None or {hop[0].gpu, hop[1].gpu} == {gpu, other}
            for flows in self.degrees
            if tp is None or flows <= tp
        ]
        return min(found)

    @property
    def _ratio(self) -> float:
        """The ratio of pipeline counts bounded together; coarser with many links."""
        return PIPELINES_RATIO if len(self._near) + len(self._far) <= WAYS_MAX else COARSE_RATIO

    def _of_range(self, gpu: str, tp: int, low: int, high: int, stages: int | None) -> Floats:
        """Lower bound for a range: the steps of ``low`` pipelines, as short as with ``high``."""
        if low < 2:
            return np.zeros(self._tensors)
        narrow = [flows for flows in self.degrees if flows <= tp]
        mine = self._links_into("near", gpu)
        machine = max(lot.gpus_per_machine for lot in self.lots)
        shared = stages or 1
        to_owner = self.costs.has_owners
        rings = []
        for is_gloo in {uses_gloo(lot.gpu) for lot in self.lots}:
            # Gloo's rings follow the ranks, so a wide group may stand between a narrow one's hops.
            some = self.degrees if is_gloo else narrow
            steps = ring_steps(low, high, to_owner=to_owner, is_gloo=is_gloo)
            if low <= max(self._by_zone.values()):
                rings.append(self._ring(steps, mine, some, stages=shared))
            if stages is None and low <= machine:
                rings.append(self._ring(steps, self._links_into("machine", gpu), some))
            if self._far:
                across = np.minimum(
                    self._ring(steps, mine, some, stages=shared),
                    self._ring(steps, self._links_into("far", gpu), some, stages=shared),
                )
                far_s = self._ring(steps, self._links_into("far"), self.degrees)
                rings.append(np.maximum(across, far_s))
        if self._far and not to_owner:
            far_s = self._step(self._links_into("far"), self.degrees, high)
            fewest = -(-low // len(self._by_zone))
            rings.append(2 * far_s + self._inside_zones(fewest, high, machine))
        least: Floats = np.min(rings, axis=0)
        return least

    def _ring(
        self, steps: RingSteps, hops: _Hops, flows: Sequence[int], *, stages: int = 1
    ) -> Floats:
        """Seconds of a ring by layer, each of its steps over the best of these links."""
        found = np.zeros(self._tensors)
        for count, share, shards in steps:
            found += count * self._step(hops, flows, shards, share=share, stages=stages)
        return found

    def _inside_zones(self, fewest: int, most: int, machine: int) -> Floats:
        """Reduce-scatter and all-gather in the zone with the most pipelines."""
        if fewest <= machine:
            return np.zeros(self._tensors)
        near = self._links_into("near")
        least: Floats = np.min(
            [
                2 * (a - 1) * self._step(near, self.degrees, b)
                for a, b in _ranges(fewest, most, self._ratio)
            ],
            axis=0,
        )
        return least

    def _links_into(self, where: str, gpu: str | None = None) -> _Hops:
        """The links of one sort, or those that lead to one GPU kind."""
        if where == "machine":
            hops = tuple((lot.place, lot.place) for lot in self.lots if lot.gpu == gpu)
        else:
            every = self._near if where == "near" else self._far
            hops = tuple(hop for hop in every.values() if gpu in (None, hop[1].gpu))
        return _Hops(where, gpu, hops)

    def _step(
        self,
        hops: _Hops,
        flows: Sequence[int],
        shards: int,
        *,
        share: float = 1.0,
        stages: int = 1,
    ) -> Floats:
        """Seconds of one ring step by layer, over the best of these links and numbers of flows."""
        key = (hops.where, hops.gpu, max(flows), shards, share, stages)
        if key not in self._known:
            rows = [
                self._sum_over_layers(
                    _Link(hop, width, hops.where == "machine", stages), shards, share
                )
                for hop in hops.hops
                for width in flows
            ]
            least = np.min(rows, axis=0) if rows else np.full(self._tensors, np.inf)
            self._known[key] = least
        return self._known[key]

    def _sum_over_layers(self, link: _Link, shards: int, share: float) -> Floats:
        sizes, number = self._rank_bytes(link.flows)
        seconds = [self._bytes_s(link, share * size, shards) for size in sizes.tolist()]
        return np.array(seconds)[number]

    def _rank_bytes(self, flows: int) -> tuple[Floats, Ints]:
        """The distinct gradient sizes on one rank, and the index into them of each tensor."""
        if flows not in self._sizes:
            costs = self.costs
            held = costs.parameters(flows).copy()
            # A tensor shared by embedding and head is synchronised separately.
            tied = costs.tied_parameters(flows)
            held[[0, -1]] -= tied
            held = np.append(held, tied) * costs.gradient_bytes
            self._sizes[flows] = np.unique(held, return_inverse=True)
        return self._sizes[flows]

    def _bytes_s(self, link: _Link, rank_bytes: float, shards: int) -> float:
        """Seconds of one step of ``rank_bytes``, bucket after bucket."""
        bucket = self.costs.runtime.sync_bucket_bytes
        largest_s = self._message_s(link, bucket / shards)
        if self.per_layer:
            full, rest = divmod(rank_bytes, bucket)
            return full * largest_s + self._message_s(link, rest / shards)
        # Layers may share a bucket, so each counts at the best rate of any message. Times are
        # linear between measured sizes, so one of those sizes has the best rate.
        largest = bucket / shards
        sizes, rates = self._rates(link)
        smaller = bisect_left(sizes, largest)
        rate = min([largest_s / largest, *rates[max(smaller - 1, 0) : smaller]])
        return rate * rank_bytes / shards

    def _rates(self, link: _Link) -> tuple[list[float], list[float]]:
        """The measured sizes, and the best seconds per byte up to each."""
        if link not in self._known_rates:
            measured = self.network.measured
            curves = [*(measured.within if link.is_inside else measured.between).values()]
            # A ring over TCP connections may divide each message among several.
            shares = 1 if link.is_inside else self._stripes_most(link)
            sizes = sorted(
                {
                    size * channels
                    for table in curves
                    for curve in table.values()
                    for size in curve.sizes_bytes
                    for channels in range(1, (shares if curve.is_tcp else 1) + 1)
                }
            )
            each = [self._message_s(link, size) / size for size in sizes]
            self._known_rates[link] = sizes, list(itertools.accumulate(each, min))
        return self._known_rates[link]

    def _message_s(self, link: _Link, bytes_each: float) -> float:
        sender, receiver = link.hop
        if link.is_inside:
            # Curves of more GPUs may be faster than those of fewer.
            most = max(2 * link.flows, self._machine)
            return min(
                self.network.ring_step_within(sender, gpus=gpus, bytes_each=bytes_each)
                for gpus in range(2 * link.flows, most + 1)
            )
        return self.network.ring_between_nodes(
            sender,
            receiver,
            flows=link.flows * link.stages,
            bytes_each=bytes_each,
            stripes=self._stripes_most(link),
        )

    def _stripes_most(self, link: _Link) -> int:
        """Contention apart, a ring is fastest where all GPUs of its machines belong to it."""
        free = self._machine - link.flows - (link.stages - 1) * min(self.degrees)
        return 1 + max(0, free) // min(self.degrees)

    @property
    def _machine(self) -> int:
        """GPUs of the largest machine."""
        return max(lot.gpus_per_machine for lot in self.lots)


@dataclass(frozen=True, slots=True)
class _Link:
    """A hop of a ring, with its flows."""

    hop: Hop
    flows: int
    is_inside: bool
    """Whether both groups are on one machine."""
    stages: int
    """Stages with groups on the receiver's machine, whose rings pass its NIC."""


@dataclass(frozen=True, slots=True)
class _Hops:
    """Links of one sort."""

    where: str
    gpu: str | None
    hops: tuple[Hop, ...]


def _ranges(fewest: int, most: int, ratio: float) -> Iterator[tuple[int, int]]:
    """Ranges of numbers within a ratio of each other; the last may exceed ``most``."""
    low, high = fewest, 0
    while low <= most:
        while high < low:
            # The ends do not depend on ``fewest``, so that results can be cached.
            high = max(high + 1, int(high * ratio))
        yield low, high
        low = high + 1
