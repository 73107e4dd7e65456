"""Transfer times and egress prices of a cluster: measured curves, else the catalogue's links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from simulator.hardware.catalogue import Catalogue
from simulator.hardware.runtime_constants import platform_of, uses_gloo
from simulator.hardware.types import Link, MachineType
from simulator.network.curves import Curve, is_tcp, seconds_at_flows
from simulator.spec.plan import Place
from simulator.spec.provenance import MEASURED, Provenance

LinkEnd = tuple[str, str]
"""(zone, GPU kind) of one end of a link."""

CATALOGUE_LINK = Provenance("analytic", 0.30, ("a link of the catalogue, not measured here",))


@dataclass(frozen=True, slots=True)
class MeasuredNetwork:
    """The contents of a network file: curves, prices and machine sizes."""

    between: Mapping[tuple[LinkEnd, LinkEnd], Mapping[int, Curve]] = field(default_factory=dict)
    raw_between: Mapping[tuple[LinkEnd, LinkEnd], Mapping[tuple[int, int], Curve]] = field(
        default_factory=dict
    )
    """Uncorrected curves by the number of GPUs at each end; only the ``paper`` estimator uses
    them."""
    within: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)
    """Curves between the GPUs of one machine, by GPU kind and by the number of GPUs taking part."""
    egress_usd_per_byte: Mapping[tuple[str, str], float] = field(default_factory=dict)
    price_usd_per_gpu_hour: Mapping[tuple[str, str], float] = field(default_factory=dict)
    gpus_per_node: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """Computes transfer times and egress prices, and their provenance."""

    catalogue: Catalogue
    measured: MeasuredNetwork = field(default_factory=MeasuredNetwork)
    zone_regions: Mapping[str, str] = field(default_factory=dict)
    zone_caps: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Bandwidth limit, in bytes per second, of all flows from one zone to another."""
    machines: Mapping[str, str] = field(default_factory=dict)
    """The machine type that a place without one stands for, by GPU kind."""
    _machine_types: dict[Place, MachineType] = field(init=False, repr=False, default_factory=dict)
    """Cache by place; the planner looks places up hundreds of thousands of times."""
    _links: dict[tuple[Place, Place], Link] = field(init=False, repr=False, default_factory=dict)
    """Cache of the catalogue's links, for the same reason."""

    def between_nodes(
        self,
        sender: Place,
        receiver: Place,
        *,
        flows: int,
        bytes_each: float,
        zone_bytes: float = 0.0,
    ) -> float:
        """Return the seconds of ``flows`` equal concurrent transfers between two machines.

        ``zone_bytes`` is all that the plan sends between the two zones at that time, these
        transfers included.
        """
        if bytes_each <= 0:
            return 0.0
        curves = self._curves_between(sender, receiver)
        if curves is not None:
            seconds = seconds_at_flows(curves, flows=flows, bytes_each=bytes_each)
        else:
            seconds = self._catalogue_link(sender, receiver).seconds(bytes_each, flows)
        cap = self.zone_caps.get((sender.zone, receiver.zone))
        if cap is not None:
            seconds = max(seconds, max(zone_bytes, flows * bytes_each) / cap)
        return seconds

    def ring_between_nodes(
        self,
        sender: Place,
        receiver: Place,
        *,
        flows: int,
        bytes_each: float,
        zone_bytes: float = 0.0,
        stripes: int = 1,
    ) -> float:
        """Return the seconds of such transfers as a step of a gradient all-reduce.

        NCCL builds a ring as several channels, each of which enters a machine at another GPU. So
        a ring with ``stripes`` members on a machine uses up to as many flows, of a share each,
        over links of the catalogue and over measured TCP connections. Curves of NCCL's own
        transfers are taken as they are, and gloo has one connection between neighbours.
        """
        curves = self._curves_between(sender, receiver)
        if uses_gloo(sender.gpu) or not (curves is None or is_tcp(curves)):
            stripes = 1
        seconds = min(
            self.between_nodes(
                sender,
                receiver,
                flows=flows * channels,
                bytes_each=bytes_each / channels,
                zone_bytes=zone_bytes,
            )
            for channels in range(1, stripes + 1)
        )
        ends = platform_of(sender.gpu), platform_of(receiver.gpu)
        ready_s = self.latency(receiver, sender) if uses_gloo(sender.gpu) else 0.0
        return ready_s + seconds / min(end.ring_efficiency for end in ends)

    def latency(self, sender: Place, receiver: Place) -> float:
        """Return the seconds of the shortest message between two machines, one way.

        Curves that begin with large messages say nothing of it; the catalogue does.
        """
        curves = self._curves_between(sender, receiver) or {}
        known = [curve.seconds[0] for curve in curves.values() if curve.has_packets]
        return min(known) if known else self._catalogue_link(sender, receiver).seconds(1.0)

    def between_nodes_source(self, sender: Place, receiver: Place) -> Provenance:
        """Return the provenance of ``between_nodes``."""
        curves = self._curves_between(sender, receiver)
        if curves is None:
            return CATALOGUE_LINK
        notes = {note: None for curve in curves.values() for note in curve.notes}
        known = (curve.relative_error for curve in curves.values())
        error = max((error for error in known if error is not None), default=0.0)
        return Provenance(MEASURED.source, max(MEASURED.relative_error, error), tuple(notes))

    def within_node(self, place: Place, *, gpus: int, bytes_each: float) -> float:
        """Return the seconds of a ring step in which each of ``gpus`` GPUs sends ``bytes_each``.

        Measured curves are of pairs that send in one direction. Over NVLink a GPU sends and
        receives at full speed at once; over PCIe both directions share the bus.
        """
        if bytes_each <= 0 or gpus < 2:
            return 0.0
        link = self.machine_type(place).intra_link
        curves = self.measured.within.get(place.gpu)
        if curves is None:
            return link.seconds(bytes_each, gpus)
        counts = [count for count in sorted(curves) if count >= gpus] or [max(curves)]
        curve = curves[counts[0]]
        pairs_s = curve(bytes_each)  # curve.flows pairs at once
        busy = gpus / 2 / curve.flows
        duplex = 1.0 if link.full_duplex else 2.0
        return pairs_s * max(1.0, busy) * duplex

    def ring_step_within(self, place: Place, *, gpus: int, bytes_each: float) -> float:
        """Return the seconds of a step of rings in which ``gpus`` GPUs of a machine send."""
        if bytes_each <= 0 or gpus < 2:
            return 0.0
        if place.gpu in self.measured.within:
            return self.within_node(place, gpus=gpus, bytes_each=bytes_each)
        machine = self.machine_type(place)
        link = machine.intra_link
        rate = link.ring_bytes_per_s
        if not link.full_duplex:
            # Idle GPUs leave their share of the bus to the sending ones.
            rate = min(link.flow_bytes_per_s, rate * max(1.0, machine.gpus / gpus))
        return link.step_s + bytes_each / rate

    def all_gather(self, place: Place, *, gpus: int, total_bytes: float, passes: int = 1) -> float:
        """Return the seconds of an all-gather of ``total_bytes`` between a machine's GPUs.

        ``passes`` is 2 for an all-reduce. All GPUs of the machine take part, in rings of ``gpus``
        side by side. Measured curves are of messages; otherwise a ring is launched once, and its
        steps are much shorter than a message.
        """
        if gpus < 2 or total_bytes <= 0:
            return 0.0
        machine = self.machine_type(place)
        launch_s, busy = machine.intra_link.latency_s, max(gpus, machine.gpus)
        if place.gpu in self.measured.within:
            launch_s, busy = 0.0, gpus
        step_s = self.ring_step_within(place, gpus=busy, bytes_each=total_bytes / gpus)
        return launch_s + passes * (gpus - 1) * step_s

    def all_reduce_within(self, place: Place, *, gpus: int, total_bytes: float) -> float:
        """Return the seconds of an all-reduce of ``total_bytes`` between a machine's GPUs."""
        return self.all_gather(place, gpus=gpus, total_bytes=total_bytes, passes=2)

    def egress_usd_per_byte(self, from_zone: str, to_zone: str) -> float:
        """Return the price of a byte sent from one zone to another."""
        if from_zone == to_zone:
            return 0.0
        price = self.measured.egress_usd_per_byte.get((from_zone, to_zone))
        if price is not None:
            return price
        return self.catalogue.egress_usd_per_byte(from_zone, to_zone, self.zone_regions)

    def machine_type(self, place: Place) -> MachineType:
        """Return the machine type of a place; names such as ``A100x4`` are derived from one."""
        found = self._machine_types.get(place)
        if found is None:
            named, catalogue = place.machine or self.machines.get(place.gpu), self.catalogue
            found = catalogue.machine(named) if named else catalogue.machine_for(place.gpu, 1)
            self._machine_types[place] = found
        return found

    def _catalogue_link(self, sender: Place, receiver: Place) -> Link:
        found = self._links.get((sender, receiver))
        if found is None:
            distance = self.catalogue.distance(sender.zone, receiver.zone, self.zone_regions)
            machines = self.machine_type(sender), self.machine_type(receiver)
            found = self._links[sender, receiver] = self.catalogue.link(distance, *machines)
        return found

    def _curves_between(self, sender: Place, receiver: Place) -> Mapping[int, Curve] | None:
        return self.measured.between.get(((sender.zone, sender.gpu), (receiver.zone, receiver.gpu)))
