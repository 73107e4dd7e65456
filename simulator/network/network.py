"""The network of a cluster: measured curves where there are any, else the catalogue's links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from simulator.documents.problems import InputError, Problems, malformed
from simulator.hardware.catalogue import Catalogue
from simulator.hardware.types import MachineType
from simulator.network.curves import Curve, at_flows, curve_from_bandwidths, repaired
from simulator.spec.plan import Place
from simulator.spec.provenance import MEASURED, Provenance

End = tuple[str, str]
"""(zone, GPU kind) of one side of a link."""

CATALOGUE_LINK = Provenance("analytic", 0.30, ("a link of the catalogue, not measured here",))


@dataclass(frozen=True, slots=True)
class Measured:
    """What a network file says: curves, egress prices, machine sizes, memory."""

    between: Mapping[tuple[End, End], Mapping[int, Curve]] = field(default_factory=dict)
    raw_between: Mapping[tuple[End, End], Mapping[tuple[int, int], Curve]] = field(
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
    measured: Measured = field(default_factory=Measured)
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
            seconds = at_flows(curves, flows=flows, bytes_each=bytes_each)
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


def measured_from_json(raw: Mapping[str, Any], *, place: str, catalogue: Catalogue) -> Measured:
    """Read a network file, or say what is wrong with it."""
    try:
        return _measured(raw, place, catalogue)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(malformed(place, error, "network")) from None


def _measured(raw: Mapping[str, Any], place: str, catalogue: Catalogue) -> Measured:
    problems = Problems()
    curves = _read_curves(raw, place, problems)
    sizes = raw.get("sizes_bytes")
    if not _is_growing(sizes):
        problems.add(f"{place}: sizes_bytes", "must be a growing list of positive numbers")
    problems.raise_if_any()
    assert isinstance(sizes, list)
    sizes_bytes = tuple(float(size) for size in sizes)

    def curve(identifier: int, flows: int, where: str) -> Curve | None:
        entry = curves.get(identifier)
        if entry is None or len(entry["bandwidth_GBps"]) != len(sizes_bytes):
            problems.add(
                where, f"names curve {identifier!r}, which is missing or of a wrong length"
            )
            return None
        coefficients = entry.get("coeffs")
        return curve_from_bandwidths(
            flows,
            sizes_bytes=sizes_bytes,
            bytes_per_s=tuple(value * 1e9 for value in entry["bandwidth_GBps"]),
            polynomial=tuple(coefficients) if coefficients else None,
        )

    raw_between: dict[tuple[End, End], dict[tuple[int, int], Curve]] = {}
    trusted: dict[tuple[End, End], dict[int, Curve]] = {}
    for index, entry in enumerate(raw.get("inter_node", [])):
        where = f"{place}: inter_node[{index}]"
        sides = [entry[side] for side in ("from", "to")]
        ends = [(side["zone"], catalogue.gpu_name(side["gpu_type"])) for side in sides]
        counts = (int(sides[0]["gpus"]), int(sides[1]["gpus"]))
        found = curve(entry["curve"], min(counts), where)
        if found is not None:
            raw_between.setdefault((ends[0], ends[1]), {})[counts] = found
        # A file may doubt one of its own entries and name a curve that fits better.
        better = curve(entry.get("suggested_curve", entry["curve"]), min(counts), where)
        if better is not None and counts[0] == counts[1]:
            trusted.setdefault((ends[0], ends[1]), {})[counts[0]] = better
    within: dict[str, dict[int, Curve]] = {}
    for index, entry in enumerate(raw.get("intra_node", [])):
        gpus = int(entry["gpus"])
        found = curve(entry["curve"], max(gpus // 2, 1), f"{place}: intra_node[{index}]")
        if found is not None:
            within.setdefault(catalogue.gpu_name(entry["gpu_type"]), {})[gpus] = found
    problems.raise_if_any()
    egress = raw.get("egress_usd_per_GB", {}).get("zone_to_zone", {})
    prices = raw.get("gpu_price_usd_per_hour", {}).get("simulations_constants_GPU_PRICES", {})
    return Measured(
        between={ends: repaired(table) for ends, table in trusted.items()},
        raw_between=raw_between,
        within=within,
        egress_usd_per_byte={
            (source, target): usd / 1e9
            for source, row in egress.items()
            for target, usd in row.items()
        },
        price_usd_per_gpu_hour={
            (catalogue.gpu_name(gpu), zone): float(usd)
            for gpu, row in prices.items()
            for zone, usd in row.items()
        },
        gpus_per_node={
            catalogue.gpu_name(gpu): int(count)
            for gpu, count in raw.get("gpus_per_node", {}).items()
        },
    )


def _read_curves(raw: Mapping[str, Any], place: str, problems: Problems) -> dict[int, Any]:
    curves: dict[int, Any] = {}
    entries = raw.get("curves")
    if not isinstance(entries, list):
        problems.add(f"{place}: curves", "must be a list", "see docs/formats.md, networks")
        return curves
    for index, entry in enumerate(entries):
        values = entry.get("bandwidth_GBps") if isinstance(entry, dict) else None
        if not isinstance(values, list) or not all(
            isinstance(value, int | float) and math.isfinite(value) and value > 0
            for value in values
        ):
            problems.add(
                f"{place}: curves[{index}].bandwidth_GBps", "must be a list of positive numbers"
            )
            continue
        curves[entry.get("id", index)] = entry
    return curves


def _is_growing(sizes: object) -> bool:
    return (
        isinstance(sizes, list)
        and len(sizes) > 1
        and all(isinstance(size, int | float) and size > 0 for size in sizes)
        and all(a < b for a, b in pairwise(sizes))
    )
