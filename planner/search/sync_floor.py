"""Lower bound of gradient synchronisation: no ring over this many pipelines is faster.

Every layer is held by one device group of each pipeline. Their ring, or their staged rings over
zones, is at least as slow as its hop into the machine of the group in question. That hop carries no
more flows than the group has ranks, because members on one machine are adjacent in the ring, the
narrowest first. Contention is ignored; it only adds time.

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
class SyncFloor:
    """Least seconds to synchronise each layer's gradients over the pipelines of a plan."""

    costs: LayerCosts
    network: Network
    lots: Sequence[Lot]
    degrees: Sequence[int]
    per_layer: bool
    """Whether each layer is synchronised by itself, or many layers in one pass."""
    _near: dict[object, Hop] = field(default_factory=dict)
    """The distinct links inside zones."""
    _far: dict[object, Hop] = field(default_factory=dict)
    _by_zone: Counter[str] = field(default_factory=Counter)
    _known: dict[object, Floats] = field(default_factory=dict)
    _sizes: dict[int, tuple[Floats, Ints]] = field(default_factory=dict)
    _transfers: dict[tuple[str, int, float], float] = field(default_factory=dict)
    _known_rates: dict[object, tuple[list[float], list[float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for lot in self.lots:
            self._by_zone[lot.zone] += lot.gpus
        for one in self.lots:
            for other in self.lots:
                hops = self._near if one.zone == other.zone else self._far
                hops.setdefault(self._name(one.place, other.place), (one.place, other.place))

    def _name(self, sender: Place, receiver: Place) -> object:
        """A key that is equal for links of equal speed; a large cluster has few distinct ones."""
        measured = self.network.measured.between
        curves = measured.get(((sender.zone, sender.gpu), (receiver.zone, receiver.gpu)))
        if curves is not None:
            return sender.gpu, receiver.gpu, tuple(sorted(curves.items()))
        catalogue, regions = self.network.catalogue, self.network.zone_regions
        distance = catalogue.distance(sender.zone, receiver.zone, regions)
        return sender.gpu, sender.machine, receiver.gpu, receiver.machine, distance

    def by_layer(self, gpu: str, tp: int, fewest: int, most: int) -> Floats:
        """Least seconds per layer for a group of ``tp`` GPUs of a kind, by number of pipelines."""
        return self._by_tensors(gpu, tp, fewest, most)[:-1]

    def tied_s(self, gpu: str, tp: int, fewest: int, most: int) -> float:
        """Least seconds to sum the tensor that embedding and head share, by number of groups."""
        return float(self._by_tensors(gpu, tp, fewest, most)[-1])

    @property
    def is_gloo(self) -> bool:
        """Whether a group may run several sums at a time."""
        return any(uses_gloo(lot.gpu) for lot in self.lots)

    @property
    def _tensors(self) -> int:
        """The layers, and the tensor that embedding and head share."""
        return self.costs.layer_count + 1

    def _by_tensors(self, gpu: str, tp: int, fewest: int, most: int) -> Floats:
        key = ("floor", gpu, tp, fewest, most)
        if key not in self._known:
            ranges = _ranges(fewest, most, self._ratio)
            each = [self._of_range(gpu, tp, low, high) for low, high in ranges]
            self._known[key] = np.min(each, axis=0)
        return self._known[key]

    def transfer_s(self, gpu: str, tp: int, size: float) -> float:
        """Least seconds of a message of ``size`` bytes from or to a group of a pipeline."""
        key = (gpu, tp, size)
        if key not in self._transfers:
            some = [flows for flows in self.degrees if flows <= tp]
            hops = [*self._near.values(), *self._far.values()]
            found = [
                self.network.between_nodes(*hop, flows=flows, bytes_each=size / flows)
                for hop in hops
                if gpu in (hop[0].gpu, hop[1].gpu)
                for flows in some
            ]
            # A hop within a machine needs room for both groups.
            found += [
                self.network.within_node(lot.place, gpus=2 * flows, bytes_each=size / flows)
                for lot in self.lots
                if lot.gpu == gpu and tp + min(self.degrees) <= lot.gpus_per_machine
                for flows in some
            ]
            self._transfers[key] = min(found)
        return self._transfers[key]

    def transfer_between_machines_s(self, gpu: str, tp: int, size: float) -> float:
        """The same between two machines with that GPU kind."""
        hops = [hop for hop in self._near.values() if hop[0].gpu == gpu and hop[1].gpu == gpu]
        return self.network.between_nodes(*hops[0], flows=tp, bytes_each=size / tp)

    def leave_machine_s(self, size: float) -> float:
        """Least seconds of a message of ``size`` bytes to another machine."""
        return min(
            self.network.between_nodes(*hop, flows=flows, bytes_each=size / flows)
            for hop in [*self._near.values(), *self._far.values()]
            for flows in self.degrees
        )

    @property
    def _ratio(self) -> float:
        """The ratio of pipeline counts bounded together; coarser with many links."""
        return PIPELINES_RATIO if len(self._near) + len(self._far) <= WAYS_MAX else COARSE_RATIO

    def _of_range(self, gpu: str, tp: int, low: int, high: int) -> Floats:
        """Lower bound for a range: the steps of ``low`` pipelines, as short as with ``high``."""
        if low < 2:
            return np.zeros(self._tensors)
        some = [flows for flows in self.degrees if flows <= tp]
        mine = self._into("near", gpu)
        machine = max(lot.gpus_per_machine for lot in self.lots)
        rings = []
        if low <= max(self._by_zone.values()):
            rings.append(2 * (low - 1) * self._step(mine, some, high))
        if low <= machine:
            rings.append(2 * (low - 1) * self._step(self._into("machine", gpu), some, high))
        if self._far:
            zones = len(self._by_zone)
            far_s = self._step(self._into("far"), self.degrees, high)
            across = np.minimum(
                self._step(mine, some, high), self._step(self._into("far", gpu), some, high)
            )
            rings.append(2 * (low - 1) * np.maximum(across, far_s))
            rings.append(2 * far_s + self._inside_zones(-(-low // zones), high, machine))
        least: Floats = np.min(rings, axis=0)
        return least

    def _inside_zones(self, fewest: int, most: int, machine: int) -> Floats:
        """Reduce-scatter and all-gather in the zone with the most pipelines."""
        if fewest <= machine:
            return np.zeros(self._tensors)
        near = self._into("near")
        least: Floats = np.min(
            [
                2 * (a - 1) * self._step(near, self.degrees, b)
                for a, b in _ranges(fewest, most, self._ratio)
            ],
            axis=0,
        )
        return least

    def _into(self, where: str, gpu: str | None = None) -> _Hops:
        """The links of one sort, or those that lead to one GPU kind."""
        if where == "machine":
            hops = tuple((lot.place, lot.place) for lot in self.lots if lot.gpu == gpu)
        else:
            every = self._near if where == "near" else self._far
            hops = tuple(hop for hop in every.values() if gpu in (None, hop[1].gpu))
        return _Hops(where, gpu, hops)

    def _step(self, hops: _Hops, flows: Sequence[int], shards: int) -> Floats:
        """Seconds of one ring step by layer, over the best of these links and numbers of flows."""
        key = (hops.where, hops.gpu, max(flows), shards)
        if key not in self._known:
            same_node = hops.where == "machine"
            rows = [
                self._over_layers(hop, width, shards, same_node)
                for hop in hops.hops
                for width in flows
            ]
            least = np.min(rows, axis=0) if rows else np.full(self._tensors, np.inf)
            self._known[key] = least
        return self._known[key]

    def _over_layers(self, hop: Hop, flows: int, shards: int, same_node: bool) -> Floats:
        sizes, number = self._rank_bytes(flows)
        seconds = [self._bytes_s(hop, flows, size, shards, same_node) for size in sizes.tolist()]
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

    def _bytes_s(
        self, hop: Hop, flows: int, rank_bytes: float, shards: int, same_node: bool
    ) -> float:
        """Seconds of one step of ``rank_bytes``, bucket after bucket."""
        bucket = self.costs.runtime.sync_bucket_bytes
        largest_s = self._message_s(hop, flows, bucket / shards, same_node)
        if self.per_layer:
            full, rest = divmod(rank_bytes, bucket)
            return full * largest_s + self._message_s(hop, flows, rest / shards, same_node)
        # Layers may share a bucket, so each counts at the best rate of any message. Times are
        # linear between measured sizes, so one of those sizes has the best rate.
        largest = bucket / shards
        sizes, rates = self._rates(hop, flows, same_node)
        smaller = bisect_left(sizes, largest)
        rate = min([largest_s / largest, *rates[max(smaller - 1, 0) : smaller]])
        return rate * rank_bytes / shards

    def _rates(self, hop: Hop, flows: int, same_node: bool) -> tuple[list[float], list[float]]:
        """The measured sizes, and the best seconds per byte up to each."""
        key = (hop, flows, same_node)
        if key not in self._known_rates:
            measured = self.network.measured
            curves = [*measured.within.values()] if same_node else [*measured.between.values()]
            sizes = sorted(
                {size for table in curves for curve in table.values() for size in curve.sizes_bytes}
            )
            each = [self._message_s(hop, flows, size, same_node) / size for size in sizes]
            self._known_rates[key] = sizes, list(itertools.accumulate(each, min))
        return self._known_rates[key]

    def _message_s(self, hop: Hop, flows: int, bytes_each: float, same_node: bool) -> float:
        if same_node:
            return self.network.ring_step_within(hop[0], gpus=2 * flows, bytes_each=bytes_each)
        # Contention apart, a ring is fastest where all GPUs of its machines belong to it.
        largest = max(lot.gpus_per_machine for lot in self.lots)
        return self.network.ring_between_nodes(
            *hop, flows=flows, bytes_each=bytes_each, stripes=max(1, largest // flows)
        )


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
