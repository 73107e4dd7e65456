"""The network of a cluster: measured curves where there are any, else the catalogue's links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from simulator.hardware.catalogue import Catalogue
from simulator.hardware.types import MachineType
from simulator.network.curves import Curve, seconds_at_flows
from simulator.spec.plan import Place
from simulator.spec.provenance import MEASURED, Provenance

LinkEnd = tuple[str, str]
"""(zone, GPU kind) of one side of a link."""

CATALOGUE_LINK = Provenance("analytic", 0.30, ("a link of the catalogue, not measured here",))


@dataclass(frozen=True, slots=True)
class MeasuredNetwork:
    """What a network file says: curves, egress prices, machine sizes, memory."""

    between: Mapping[tuple[LinkEnd, LinkEnd], Mapping[int, Curve]] = field(default_factory=dict)
    raw_between: Mapping[tuple[LinkEnd, LinkEnd], Mapping[tuple[int, int], Curve]] = field(
        default_factory=dict
    )
    """As the file has them, by the GPUs on each side; only the ``paper`` estimator reads these."""
    within: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)
    """Between GPUs of one machine, by GPU kind and by the number of GPUs that take part."""
    egress_usd_per_byte: Mapping[tuple[str, str], float] = field(default_factory=dict)
    price_usd_per_gpu_hour: Mapping[tuple[str, str], float] = field(default_factory=dict)
    gpus_per_node: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """Answers how long transfers take and what they cost, with the source of each answer."""

    catalogue: Catalogue
    measured: MeasuredNetwork = field(default_factory=MeasuredNetwork)
    zone_regions: Mapping[str, str] = field(default_factory=dict)
    zone_caps: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Most bytes per second that all flows from one zone to another carry together."""
    _machine_types: dict[Place, MachineType] = field(init=False, repr=False, default_factory=dict)
    """By place; the planner asks hundreds of thousands of times."""

    def between_nodes(
        self,
        sender: Place,
        receiver: Place,
        *,
        flows: int,
        bytes_each: float,
        zone_bytes: float = 0.0,
    ) -> float:
        """Seconds that ``flows`` equal transfers take from one machine to another.

        ``zone_bytes`` is what the plan sends from zone to zone at the same time, this included.
        """
        if bytes_each <= 0:
            return 0.0
        curves = self._curves_between(sender, receiver)
        if curves is not None:
            seconds = seconds_at_flows(curves, flows=flows, bytes_each=bytes_each)
        else:
            distance = self.catalogue.distance(sender.zone, receiver.zone, self.zone_regions)
            link = self.catalogue.link(
                distance, self.machine_type(sender), self.machine_type(receiver)
            )
            seconds = link.seconds(bytes_each, flows)
        cap = self.zone_caps.get((sender.zone, receiver.zone))
        if cap is not None:
            seconds = max(seconds, max(zone_bytes, flows * bytes_each) / cap)
        return seconds

    def between_nodes_source(self, sender: Place, receiver: Place) -> Provenance:
        """Where the answer of ``between_nodes`` comes from."""
        curves = self._curves_between(sender, receiver)
        if curves is None:
            return CATALOGUE_LINK
        notes = {note: None for curve in curves.values() for note in curve.notes}
        return Provenance(MEASURED.source, MEASURED.relative_error, tuple(notes))

    def within_node(self, place: Place, *, gpus: int, bytes_each: float) -> float:
        """Seconds of one step in which each of ``gpus`` GPUs sends ``bytes_each`` to its neighbour.

        The measured curves are those of pairs that send one way. Over NVLink each GPU sends and
        receives at full speed at once; over PCIe both ways share the bus.
        """
        if bytes_each <= 0 or gpus < 2:
            return 0.0
        link = self.machine_type(place).intra_link
        curves = self.measured.within.get(place.gpu)
        if curves is None:
            return link.seconds(bytes_each, gpus)
        counts = [count for count in sorted(curves) if count >= gpus] or [max(curves)]
        curve = curves[counts[0]]
        pairs_share = curve(bytes_each)  # flows = gpus / 2 pairs at once
        busy = gpus / 2 / curve.flows
        duplex = 1.0 if link.full_duplex else 2.0
        return pairs_share * max(1.0, busy) * duplex

    def all_gather(self, place: Place, *, gpus: int, total_bytes: float) -> float:
        """Seconds in which the GPUs of a machine gather a tensor of which each holds a share."""
        if gpus < 2:
            return 0.0
        return (gpus - 1) * self.within_node(place, gpus=gpus, bytes_each=total_bytes / gpus)

    def all_reduce_within(self, place: Place, *, gpus: int, total_bytes: float) -> float:
        """Seconds in which the GPUs of a machine sum a tensor that each of them holds whole."""
        return 2.0 * self.all_gather(place, gpus=gpus, total_bytes=total_bytes)

    def egress_usd_per_byte(self, from_zone: str, to_zone: str) -> float:
        """Price of a byte that leaves one zone for another."""
        if from_zone == to_zone:
            return 0.0
        price = self.measured.egress_usd_per_byte.get((from_zone, to_zone))
        if price is not None:
            return price
        return self.catalogue.egress_usd_per_byte(from_zone, to_zone, self.zone_regions)

    def machine_type(self, place: Place) -> MachineType:
        """The machine type of a place; one that is named by GPU kind and count is made up."""
        found = self._machine_types.get(place)
        if found is None:
            named, catalogue = place.machine, self.catalogue
            found = catalogue.machine(named) if named else catalogue.machine_for(place.gpu, 1)
            self._machine_types[place] = found
        return found

    def _curves_between(self, sender: Place, receiver: Place) -> Mapping[int, Curve] | None:
        return self.measured.between.get(((sender.zone, sender.gpu), (receiver.zone, receiver.gpu)))
