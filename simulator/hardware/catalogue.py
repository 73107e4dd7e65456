"""The hardware catalogue: look up GPUs, machine types, zones, links and prices.

``load_catalogue`` reads the built-in tables (``simulator/data``) and lays a user's over them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from simulator.documents.problems import InputError, Problem, nearest
from simulator.hardware import catalogue_overlay
from simulator.hardware.catalogue_builder import CatalogueTables, build_tables
from simulator.hardware.types import Distance, Egress, Gpu, Link, MachineType

CLOUD = "gce"
"""The provider whose price list the egress rules follow."""

_CLOSEST_FIRST = ((0, 1), (1, 0), (0, 2), (1, 1), (2, 0), (1, 2), (2, 1))
"""The kinds of places that a price of egress names: zone, region and continent, by number."""

_GPU_TIMES_COUNT = re.compile(r"(?P<gpu>.+)x(?P<gpus>[1-9][0-9]{0,4})\Z")


@dataclass(frozen=True, slots=True, eq=False)
class Catalogue(CatalogueTables):
    """Everything known about hardware, places and prices.

    The parameter ``extra_regions`` maps the zones that a cluster file declares to their regions;
    they take precedence over the catalogue's.
    """

    def gpu_name(self, name: str) -> str:
        """Return the canonical name of a GPU, given in any spelling or as an alias."""
        return _resolve_name(name, self.spelling.gpus, self.gpus, what="GPU")

    def gpu(self, name: str) -> Gpu:
        """Return a GPU by its name or an alias."""
        return self.gpus[self.gpu_name(name)]

    def machine_name(self, name: str) -> str:
        """Return the canonical name of a machine type, given in any spelling or as an alias."""
        return _resolve_name(name, self.spelling.machines, self.machines, what="machine type")

    def machine(self, name: str) -> MachineType:
        """Return a machine type by its name, an alias or ``"<gpu>x<n>"``."""
        cut = _GPU_TIMES_COUNT.match(name)
        if catalogue_overlay.spelling_key(name) not in self.spelling.machines and cut is not None:
            gpu = catalogue_overlay.spelling_key(cut["gpu"])
            if gpu in self.spelling.gpus:
                return self.machine_for(gpu, int(cut["gpus"]))
        return self.machines[self.machine_name(name)]

    def machines_for(self, gpu: str) -> tuple[MachineType, ...]:
        """Return the machine types with a GPU kind, the smallest first."""
        wanted = self.gpu_name(gpu)
        found = (machine for machine in self.machines.values() if machine.gpu == wanted)
        return tuple(sorted(found, key=lambda machine: machine.gpus))

    def machine_for(self, gpu: str, gpus_per_machine: int) -> MachineType:
        """Return a machine with this many GPUs: a machine type, or one scaled to the count."""
        name = self.gpu_name(gpu)
        machines = self.machines_for(name)
        if not machines:
            cure = "add one to your catalogue file as [machine.NAME]"
            raise InputError(Problem("", f"no machine type has the GPU {name}", cure))
        # Among equal sizes take the first in the file, where cloud machines come first.
        larger = (machine for machine in machines if machine.gpus >= gpus_per_machine)
        machine = next(larger, machines[-1])
        if machine.gpus == gpus_per_machine:
            return machine
        return machine.with_gpus(gpus_per_machine, name=f"{name}x{gpus_per_machine}")

    def zone_region(self, zone: str, extra_regions: Mapping[str, str] | None = None) -> str:
        """Return the region of a zone."""
        declared = extra_regions or {}
        region = declared.get(zone, self.zones.get(zone))
        if region is None:
            cure = nearest(zone, [*self.zones, *declared])
            cure += " (or declare it: [[zone]] with name and region)"
            raise InputError(Problem("", f'no zone "{zone}" is known', cure))
        return region

    def distance(
        self, zone_a: str, zone_b: str, extra_regions: Mapping[str, str] | None = None
    ) -> Distance:
        """Return how far apart two zones are; ``world`` if a continent is unknown."""
        region_a = self.zone_region(zone_a, extra_regions)
        region_b = self.zone_region(zone_b, extra_regions)
        if zone_a == zone_b:
            return "zone"
        if region_a == region_b:
            return "region"
        here, there = self.regions.get(region_a), self.regions.get(region_b)
        if here is not None and there is not None and here.continent == there.continent:
            return "continent"
        return "world"

    def link(self, distance: Distance, here: MachineType, there: MachineType | None = None) -> Link:
        """Return the default link between two machines at a distance."""
        return self.distance_limits[distance].link(here.nic, (there or here).nic)

    def price_usd_per_gpu_hour(
        self,
        name: str,
        zone: str,
        *,
        spot: bool = False,
        gpus_per_machine: int | None = None,
        extra_regions: Mapping[str, str] | None = None,
    ) -> float | None:
        """Return the price of one GPU per hour, or ``None`` if it is unknown.

        ``name`` is a machine type or a GPU. The price of a GPU is its share of the machine type
        with ``gpus_per_machine`` GPUs, or else of the smallest one priced in the region. ``cpu``
        costs nothing: the local host is already paid for.
        """
        region = self.zone_region(zone, extra_regions)
        if catalogue_overlay.spelling_key(name) in self.spelling.gpus:
            candidates = self.machines_for(name)
        else:
            candidates = (self.machine(name),)
        if gpus_per_machine is not None:
            # A stable sort moves machines of exactly this size to the front.
            candidates = tuple(sorted(candidates, key=lambda one: one.gpus != gpus_per_machine))
        for machine in candidates:
            price = machine.price(region)
            if price is not None:
                usd_per_hour = price.usd_per_hour(spot=spot)
                return None if usd_per_hour is None else usd_per_hour / machine.gpus
        return None

    def egress(
        self, from_zone: str, to_zone: str, extra_regions: Mapping[str, str] | None = None
    ) -> Egress:
        """Return the egress price from one zone to another, with its source.

        The closest price wins: of zones before regions before continents. One of two continents
        is for traffic inside the cloud, as its list is.
        """
        region_a = self.zone_region(from_zone, extra_regions)
        region_b = self.zone_region(to_zone, extra_regions)
        here, there = self.regions.get(region_a), self.regions.get(region_b)
        pairs, rules = self.egress_by_pair, self.egress_rules
        from_cloud = here is not None and here.provider == CLOUD
        to_cloud = there is not None and there.provider == CLOUD
        if (from_zone, to_zone) in pairs:
            return pairs[from_zone, to_zone]
        if from_zone == to_zone:
            return rules["zone"]
        ends = [
            (zone, region, "" if known is None else known.continent)
            for zone, region, known in ((from_zone, region_a, here), (to_zone, region_b, there))
        ]
        for a, b in _CLOSEST_FIRST:
            if (ends[0][a], ends[1][b]) in pairs:
                return pairs[ends[0][a], ends[1][b]]
        if not from_cloud:
            provider = "" if here is None else here.provider
            return rules.get(f"{provider}-to-outside", rules["outside"])
        if not to_cloud:
            return rules["cloud-to-outside"]
        if region_a == region_b:
            return rules["region"]
        assert here is not None
        assert there is not None
        return pairs.get((here.continent, there.continent), rules["cloud-to-outside"])

    def egress_usd_per_byte(
        self, from_zone: str, to_zone: str, extra_regions: Mapping[str, str] | None = None
    ) -> float:
        """Return only the figure of ``egress``."""
        return self.egress(from_zone, to_zone, extra_regions).usd_per_byte


def load_catalogue(override_path: Path | None = None) -> Catalogue:
    """Read the built-in catalogue, overlaid with a user's file if there is one."""
    if override_path is None:
        return _built_in()
    below = catalogue_overlay.built_in_facts()
    above = catalogue_overlay.user_facts(override_path)
    spelling = catalogue_overlay.Spelling.of([*below.values(), *above])
    return _of(
        build_tables(catalogue_overlay.overlay(below, [spelling.canonical(fact) for fact in above]))
    )


@cache
def _built_in() -> Catalogue:
    return _of(build_tables(catalogue_overlay.built_in_facts()))


def _of(tables: CatalogueTables) -> Catalogue:
    return Catalogue(**{one.name: getattr(tables, one.name) for one in fields(tables)})


def _resolve_name(name: str, names: Mapping[str, str], known: Iterable[str], *, what: str) -> str:
    found = names.get(catalogue_overlay.spelling_key(name))
    if found is None:
        raise InputError(Problem("", f'no {what} "{name}" is known', nearest(name, known)))
    return found
