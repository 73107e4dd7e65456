"""The least that summing gradients takes: what no ring over so many pipelines can beat.

Every layer is held by one device group of each pipeline. Their ring, or their rings in stages
over zones, is at least as slow as its hop into the machine of the group that is asked about, and
that hop carries no more flows than the group has ranks: members of one machine stand together in
the ring, the narrowest first. Contention only adds.
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
from simulator.hardware.runtime_constants import platform_of
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.network.network import Network
from simulator.spec.plan import Place

PIPELINES_RATIO = 1.04
"""Numbers of pipelines this close to each other are looked at as one."""
WAYS_MAX, COARSE_RATIO = 4, 1.3
"""With more links than this, those that are less close."""

Way = tuple[Place, Place]
"""From a machine at one place to one at another, or to a neighbour in the same machine."""


@dataclass(slots=True, eq=False)
class SyncFloor:
    """Least seconds to sum each layer's gradients over the pipelines of a plan."""

    costs: LayerCosts
    network: Network
    lots: Sequence[Lot]
    degrees: Sequence[int]
    per_layer: bool
    """Whether each layer is summed by itself, or many of them in one go."""
    _near: dict[object, Way] = field(default_factory=dict)
    """The different links inside zones."""
    _far: dict[object, Way] = field(default_factory=dict)
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
                ways = self._near if one.zone == other.zone else self._far
                ways.setdefault(self._name(one.place, other.place), (one.place, other.place))

    def _name(self, sender: Place, receiver: Place) -> object:
        """What tells links apart; in a large cluster most are alike."""
        measured = self.network.measured.between
        curves = measured.get(((sender.zone, sender.gpu), (receiver.zone, receiver.gpu)))
        if curves is not None:
            return sender.gpu, receiver.gpu, tuple(sorted(curves.items()))
        catalogue, regions = self.network.catalogue, self.network.zone_regions
        distance = catalogue.distance(sender.zone, receiver.zone, regions)
        return sender.gpu, sender.machine, receiver.gpu, receiver.machine, distance

    def by_layer(self, gpu: str, tp: int, fewest: int, most: int) -> Floats:
        """For a group of ``tp`` GPUs of a kind, where there are so many pipelines."""
        key = ("floor", gpu, tp, fewest, most)
        if key not in self._known:
            ranges = _ranges(fewest, most, self._ratio)
            each = [self._of_range(gpu, tp, low, high) for low, high in ranges]
            self._known[key] = np.min(each, axis=0)
        return self._known[key]

    def transfer_s(self, gpu: str, tp: int, size: float) -> float:
        """The least time of a message of so many bytes from or to a group of a pipeline."""
        key = (gpu, tp, size)
        if key not in self._transfers:
            some = [flows for flows in self.degrees if flows <= tp]
            ways = [*self._near.values(), *self._far.values()]
            found = [
                self.network.between_nodes(*way, flows=flows, bytes_each=size / flows)
                for way in ways
                if gpu in (way[0].gpu, way[1].gpu)
                for flows in some
            ]
            # Both groups of a hop within a machine stand on it.
            found += [
                self.network.within_node(lot.place, gpus=2 * flows, bytes_each=size / flows)
                for lot in self.lots
                if lot.gpu == gpu and tp + min(self.degrees) <= lot.gpus_per_machine
                for flows in some
            ]
            self._transfers[key] = min(found)
        return self._transfers[key]

    def transfer_out_s(self, gpu: str, tp: int, size: float) -> float:
        """The same between two machines of that kind of GPU."""
        ways = [way for way in self._near.values() if way[0].gpu == gpu and way[1].gpu == gpu]
        return self.network.between_nodes(*ways[0], flows=tp, bytes_each=size / tp)

    def way_out_s(self, size: float) -> float:
        """The least time of a message of so many bytes to another machine."""
        return min(
            self.network.between_nodes(*way, flows=flows, bytes_each=size / flows)
            for way in [*self._near.values(), *self._far.values()]
            for flows in self.degrees
        )

    @property
    def _ratio(self) -> float:
        """Coarser where there are many links to ask about."""
        return PIPELINES_RATIO if len(self._near) + len(self._far) <= WAYS_MAX else COARSE_RATIO

    def _of_range(self, gpu: str, tp: int, low: int, high: int) -> Floats:
        """As many steps as for ``low`` pipelines, each as short as for ``high``."""
        if low < 2:
            return np.zeros(self.costs.layer_count)
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
        """Reducing and gathering in the zone that has the most pipelines."""
        if fewest <= machine:
            return np.zeros(self.costs.layer_count)
        near = self._into("near")
        least: Floats = np.min(
            [
                2 * (a - 1) * self._step(near, self.degrees, b)
                for a, b in _ranges(fewest, most, self._ratio)
            ],
            axis=0,
        )
        return least

    def _into(self, where: str, gpu: str | None = None) -> _Ways:
        """The links of one sort, or those of them that lead to one GPU kind."""
        if where == "machine":
            ways = tuple((lot.place, lot.place) for lot in self.lots if lot.gpu == gpu)
        else:
            every = self._near if where == "near" else self._far
            ways = tuple(way for way in every.values() if gpu in (None, way[1].gpu))
        return _Ways(where, gpu, ways)

    def _step(self, ways: _Ways, flows: Sequence[int], shards: int) -> Floats:
        """One step by layer, over the best of these links and numbers of flows."""
        key = (ways.where, ways.gpu, max(flows), shards)
        if key not in self._known:
            same_node = ways.where == "machine"
            rows = [
                self._over_layers(way, width, shards, same_node)
                for way in ways.ways
                for width in flows
            ]
            least = np.min(rows, axis=0) if rows else np.full(self.costs.layer_count, np.inf)
            self._known[key] = least
        return self._known[key]

    def _over_layers(self, way: Way, flows: int, shards: int, same_node: bool) -> Floats:
        sizes, number = self._rank_bytes(flows)
        seconds = [self._bytes_s(way, flows, size, shards, same_node) for size in sizes.tolist()]
        return np.array(seconds)[number]

    def _rank_bytes(self, flows: int) -> tuple[Floats, Ints]:
        """The different sizes of layers' gradients on one of so many ranks, and each layer's."""
        if flows not in self._sizes:
            costs = self.costs
            held = costs.parameters(flows).copy()
            # A tensor that embedding and head share has a job of its own, which is left out.
            held[[0, -1]] -= costs.tied_parameters(flows)
            fp32 = costs.job.precision == "fp32"
            held *= 4 if fp32 else costs.runtime.gradient_bytes_16bit
            self._sizes[flows] = np.unique(held, return_inverse=True)
        return self._sizes[flows]

    def _bytes_s(
        self, way: Way, flows: int, rank_bytes: float, shards: int, same_node: bool
    ) -> float:
        """One step of so many bytes per rank, bucket after bucket."""
        bucket = self.costs.runtime.sync_bucket_bytes
        if self.per_layer:
            full, rest = divmod(rank_bytes, bucket)
            return full * self._message_s(way, flows, bucket / shards, same_node) + (
                self._message_s(way, flows, rest / shards, same_node)
            )
        # Layers may share a bucket, so that each counts at the best rate of any message. Times
        # are straight between the sizes that were measured, so that one of those is the best.
        largest = bucket / shards
        sizes, rates = self._rates(way, flows, same_node)
        rate = self._message_s(way, flows, largest, same_node) / largest
        smaller = bisect_left(sizes, largest)
        if smaller:
            rate = min(rate, rates[smaller - 1])
        return rate * rank_bytes / shards

    def _rates(self, way: Way, flows: int, same_node: bool) -> tuple[list[float], list[float]]:
        """The sizes that were measured, and the best seconds per byte up to each."""
        key = (way, flows, same_node)
        if key not in self._known_rates:
            measured = self.network.measured
            curves = [*measured.within.values()] if same_node else [*measured.between.values()]
            sizes = sorted(
                {size for table in curves for curve in table.values() for size in curve.sizes_bytes}
            )
            each = [self._message_s(way, flows, size, same_node) / size for size in sizes]
            self._known_rates[key] = sizes, list(itertools.accumulate(each, min))
        return self._known_rates[key]

    def _message_s(self, way: Way, flows: int, bytes_each: float, same_node: bool) -> float:
        sender, receiver = way
        if same_node:
            return self.network.within_node(sender, gpus=2 * flows, bytes_each=bytes_each)
        seconds = self.network.between_nodes(sender, receiver, flows=flows, bytes_each=bytes_each)
        return seconds / min(
            platform_of(sender.gpu).ring_efficiency, platform_of(receiver.gpu).ring_efficiency
        )


@dataclass(frozen=True, slots=True)
class _Ways:
    """Links of one sort."""

    where: str
    gpu: str | None
    ways: tuple[Way, ...]


def _ranges(fewest: int, most: int, ratio: float) -> Iterator[tuple[int, int]]:
    """Runs of numbers that are close to each other; the last may go beyond the most."""
    low, high = fewest, 0
    while low <= most:
        while high < low:
            # The same ends whatever the beginning, so that prices are asked for once.
            high = max(high + 1, int(high * ratio))
        yield low, high
        low = high + 1
