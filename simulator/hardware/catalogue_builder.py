"""Builds typed catalogue tables from facts, and reports every mistake in them at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from simulator.documents.fields import InvalidValue, Table, quote, valid_number, valid_text
from simulator.documents.problems import Problems, nearest
from simulator.hardware.catalogue_overlay import (
    Fact,
    FactName,
    Spelling,
    source_and_date,
    spelling_key,
)
from simulator.hardware.types import (
    ANYWHERE,
    DISTANCES,
    GIB,
    GPU_PRECISIONS,
    Distance,
    DistanceLimits,
    Egress,
    Gpu,
    Link,
    MachineType,
    Price,
    Region,
)

EGRESS_RULES = ("zone", "region", "cloud-to-outside", "aws-to-outside", "outside")

NVLINK_STEP_S = 1.25e-6
"""NCCL 2, src/graph/tuning.cc: latency of a ring's step over NVLink, protocol LL128."""


@dataclass(frozen=True, slots=True, eq=False)
class CatalogueTables:
    """The checked facts, by name."""

    gpus: Mapping[str, Gpu]
    machines: Mapping[str, MachineType]
    zones: Mapping[str, str]
    """Each zone's region."""
    regions: Mapping[str, Region]
    distance_limits: Mapping[Distance, DistanceLimits]
    egress_by_pair: Mapping[tuple[str, str], Egress]
    """By (from, to), each a zone, a region or a continent."""
    egress_rules: Mapping[str, Egress]
    spelling: Spelling


def build_tables(known: Mapping[FactName, Fact]) -> CatalogueTables:
    """Check all facts and build the tables."""
    builder = _Builder(known)
    tables = builder.tables()
    builder.problems.raise_if_any()
    return tables


class _Builder:
    """Reads facts kind by kind and checks that every name they refer to exists."""

    def __init__(self, known: Mapping[FactName, Fact]) -> None:
        self.known = known
        self.problems = Problems()
        self.spelling = Spelling.of(known.values())
        self.sources: dict[str, tuple[str, str]] = {}

    def tables(self) -> CatalogueTables:
        for fact, table in self.of("source"):
            text = table.text("text", required=True) or ""
            self.sources[fact.name[1]] = (text, table.text("date", required=True) or "")
            table.finish()
        gpus = {fact.name[1]: self._gpu(fact, table) for fact, table in self.of("gpu")}
        regions = {fact.name[1]: self._region(fact, table) for fact, table in self.of("region")}
        zones = self._zones(regions)
        prices = _Prices(self, gpus=gpus, regions=regions)
        machines = self._machines(gpus, prices)
        prices.check_machines(machines)
        places = {*zones, *regions, *(region.continent for region in regions.values())}
        return CatalogueTables(
            gpus=MappingProxyType(gpus),
            machines=MappingProxyType(machines),
            zones=MappingProxyType(zones),
            regions=MappingProxyType(regions),
            distance_limits=MappingProxyType(self._reaches()),
            egress_by_pair=MappingProxyType(self._egress_by_pair(places)),
            egress_rules=MappingProxyType(self._egress_rules()),
            spelling=self.spelling,
        )

    def of(self, kind: str) -> list[tuple[Fact, Table]]:
        """Return all facts of a kind, opened for reading."""
        return [
            (fact, fact.table(self.problems))
            for fact in self.known.values()
            if fact.name[0] == kind
        ]

    def close(self, fact: Fact, table: Table) -> tuple[str, str]:
        """Report unknown keys and return the source and date of a fact."""
        found = source_and_date(fact, table, self.sources)
        table.finish()
        return found

    def must_be_known(self, place: str, name: str, known: Iterable[str]) -> None:
        """Report a name that is not known."""
        names = list(known)
        if name not in names:
            self.problems.add(place, f"{quote(name)} is not known", nearest(name, names))

    def _check_aliases(self, fact: Fact, table: Table, names: Mapping[str, str]) -> None:
        for alias in table.value("aliases", _texts) or ():
            owner = names[spelling_key(alias)]
            if owner != fact.name[1]:
                table.report("aliases", f"{quote(alias)} already means {owner}", "leave it out")

    def _gpu(self, fact: Fact, table: Table) -> Gpu:
        memory_gib = table.number("memory_gib", above=0, required=True)
        usable_gib = table.number("usable_memory_gib", above=0, most=memory_gib, required=True)
        tflops = table.value("tflops", _rates, required=True) or {}
        bandwidth_gbytes_per_s = _positive(table, "memory_bandwidth_gbytes_per_s")
        multiprocessors = table.integer("multiprocessors", least=1)
        host_gbytes_per_s = table.number("host_gbytes_per_s", above=0)
        self._check_aliases(fact, table, self.spelling.gpus)
        source, date = self.close(fact, table)
        return Gpu(
            name=fact.name[1],
            memory_bytes=round((memory_gib or 1.0) * GIB),
            usable_memory_bytes=round((usable_gib or 1.0) * GIB),
            peak_flops=MappingProxyType({key: rate * 1e12 for key, rate in tflops.items()}),
            memory_bandwidth_bytes_per_s=bandwidth_gbytes_per_s * 1e9,
            source=source,
            date=date,
            multiprocessors=multiprocessors,
            host_bytes_per_s=None if host_gbytes_per_s is None else host_gbytes_per_s * 1e9,
        )

    def _region(self, fact: Fact, table: Table) -> Region:
        continent = table.text("continent", required=True) or ""
        provider = table.text("provider", default="own")
        table.value("zones", _texts)
        source, date = self.close(fact, table)
        return Region(fact.name[1], continent, provider, source, date)

    def _zones(self, regions: Mapping[str, Region]) -> dict[str, str]:
        zones: dict[str, str] = {}
        for fact, table in self.of("region"):
            listed = fact.values.get("zones", [])
            for zone in listed if isinstance(listed, list) else []:
                zones[str(zone)] = table.path[1]  # type: ignore[assignment]  # a name, not an index
        for fact, table in self.of("zone"):
            region = table.text("region", required=True)
            if region is not None:
                self.must_be_known(table.place_of("region"), region, regions)
                zones[fact.name[1]] = region
            table.finish()
        return zones

    def _machines(self, gpus: Mapping[str, Gpu], prices: _Prices) -> dict[str, MachineType]:
        nics = {fact.name[1]: self._link(fact, table) for fact, table in self.of("nic")}
        links = {fact.name[1]: self._link(fact, table) for fact, table in self.of("link")}
        return {
            fact.name[1]: self._machine(
                fact, table, gpus=gpus, links=links, nics=nics, prices=prices
            )
            for fact, table in self.of("machine")
        }

    def _machine(
        self,
        fact: Fact,
        table: Table,
        *,
        gpus: Mapping[str, Gpu],
        links: Mapping[str, Link],
        nics: Mapping[str, Link],
        prices: _Prices,
    ) -> MachineType:
        gpu = table.text("gpu", required=True) or ""
        gpu = self.spelling.gpus.get(spelling_key(gpu), gpu)
        count = table.integer("gpus", required=True) or 1
        link = table.text("link", required=True) or ""
        nic = table.text("nic", required=True) or ""
        host = table.text("host")
        for key, name, known in (
            ("gpu", gpu, gpus),
            ("link", link, links),
            ("nic", nic, nics),
            ("host", host, prices.host_series),
        ):
            if name:
                self.must_be_known(table.place_of(key), name, known)
        rate_bytes_per_s = _positive(table, "nic_gbit_per_s") * 1e9 / 8
        vcpus = table.integer("vcpus")
        host_memory_gib = table.number("host_memory_gib", above=0)
        self._check_aliases(fact, table, self.spelling.machines)
        source, date = self.close(fact, table)
        out = nics.get(nic, _NO_LINK)
        # In [nic] tables the aggregate is a share of the machine's own rate.
        share = out.aggregate_bytes_per_s
        return MachineType(
            name=fact.name[1],
            gpu=gpu,
            gpus=count,
            intra_link=links.get(link, _NO_LINK),
            nic=replace(out, aggregate_bytes_per_s=share * rate_bytes_per_s),
            nic_bytes_per_s=rate_bytes_per_s,
            vcpus=vcpus,
            host_memory_bytes=None if host_memory_gib is None else round(host_memory_gib * GIB),
            prices=MappingProxyType(prices.of(fact.name[1], gpu, count, host=host, vcpus=vcpus)),
            source=source,
            date=date,
        )

    def _link(self, fact: Fact, table: Table) -> Link:
        latency_us = table.number("latency_us", least=0, required=True) or 0.0
        flow_gbytes_per_s = _positive(table, "flow_gbytes_per_s")
        ring_gbytes_per_s, step_us = flow_gbytes_per_s, NVLINK_STEP_S * 1e6
        if fact.name[0] == "nic":
            aggregate = table.number("share_of_rate", above=0, most=1, required=True) or 1.0
        else:
            aggregate = _positive(table, "aggregate_gbytes_per_s") * 1e9
            ring_gbytes_per_s = table.number("ring_gbytes_per_s", above=0) or ring_gbytes_per_s
            step_us = table.number("step_us", least=0, default=step_us)
        full_duplex = table.flag("full_duplex", default=True)
        source, date = self.close(fact, table)
        return Link(
            latency_us * 1e-6,
            flow_gbytes_per_s * 1e9,
            aggregate,
            source,
            date,
            full_duplex,
            ring_bytes_per_s=ring_gbytes_per_s * 1e9,
            step_s=step_us * 1e-6,
        )

    def _reaches(self) -> dict[Distance, DistanceLimits]:
        distance_limits: dict[Distance, DistanceLimits] = {}
        for fact, table in self.of("distance"):
            self.must_be_known(table.place, fact.name[1], DISTANCES)
            latency_us = table.number("latency_us", least=0, required=True) or 0.0
            caps = (
                None if cap is None else cap * 1e9
                for cap in (
                    table.number("flow_gbytes_per_s", above=0),
                    table.number("aggregate_gbytes_per_s", above=0),
                )
            )
            flow, aggregate = caps
            source_and_date = self.close(fact, table)
            for distance in DISTANCES:
                if distance == fact.name[1]:
                    distance_limits[distance] = DistanceLimits(
                        distance, latency_us * 1e-6, flow, aggregate, *source_and_date
                    )
        return distance_limits

    def _egress_by_pair(self, places: Iterable[str]) -> dict[tuple[str, str], Egress]:
        known = sorted(places)
        pairs: dict[tuple[str, str], Egress] = {}
        for fact, table in self.of("egress"):
            _, here, there = fact.name
            for place in (here, there):
                self.must_be_known(table.place, place, known)
            pairs[here, there] = self._egress(fact, table)
        return pairs

    def _egress_rules(self) -> dict[str, Egress]:
        rules: dict[str, Egress] = {}
        for fact, table in self.of("egress_rule"):
            self.must_be_known(table.place, fact.name[1], EGRESS_RULES)
            rules[fact.name[1]] = self._egress(fact, table)
        return rules

    def _egress(self, fact: Fact, table: Table) -> Egress:
        usd_per_gib = table.number("usd_per_gib", least=0, required=True) or 0.0
        source, date = self.close(fact, table)
        return Egress(usd_per_gib / GIB, source, date)


class _Prices:
    """Prices of whole machines, and of hosts and accelerators that a cloud sells separately."""

    def __init__(
        self, builder: _Builder, *, gpus: Mapping[str, Gpu], regions: Mapping[str, Region]
    ) -> None:
        self._builder = builder
        self._regions = (*regions, ANYWHERE)
        self._host_vcpus: dict[tuple[str, str], int] = {}
        self._host = self._read("host")
        self._accelerator = self._read("accelerator", names=gpus)
        self._machine = self._read("price")
        self.host_series = sorted({series for series, _ in self._host})

    def of(
        self, machine: str, gpu: str, gpus: int, *, host: str | None, vcpus: int | None
    ) -> dict[str, Price]:
        """Return the prices of a machine by region: its own, or else the sum of its parts."""
        prices: dict[str, Price] = {}
        for (series, region), price in self._host.items():
            accelerator = self._accelerator.get((gpu, region))
            if series == host and vcpus is not None and accelerator is not None:
                share = vcpus / self._host_vcpus[series, region]
                prices[region] = price.scaled(share).plus(accelerator.scaled(gpus))
        for (name, region), price in self._machine.items():
            if name == machine:
                prices[region] = price
        return prices

    def check_machines(self, machines: Mapping[str, MachineType]) -> None:
        """Report prices of machine types that do not exist."""
        for fact, table in self._builder.of("price"):
            self._builder.must_be_known(table.place, fact.name[1], machines)

    def _read(
        self, kind: str, *, names: Iterable[str] | None = None
    ) -> dict[tuple[str, str], Price]:
        prices: dict[tuple[str, str], Price] = {}
        for fact, table in self._builder.of(kind):
            _, name, region = fact.name
            self._builder.must_be_known(table.place, region, self._regions)
            if names is not None:
                self._builder.must_be_known(table.place, name, names)
            if kind == "host":
                self._host_vcpus[name, region] = table.integer("vcpus", required=True) or 1
            # A price of 0 has to be written; a missing one is never taken for it.
            on_demand = table.number("on_demand_usd_per_hour", least=0, required=True)
            spot = table.number("spot_usd_per_hour", least=0)
            source, date = self._builder.close(fact, table)
            prices[name, region] = Price(on_demand or 0.0, spot, source, date)
        return prices


_NO_LINK = Link(0.0, 1.0, 1.0, "", "")
"""Placeholder for an unknown link, whose problem is raised before the tables are used."""


def _positive(table: Table, key: str) -> float:
    return table.number(key, above=0, required=True) or 1.0


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise InvalidValue(f"is {quote(value)}", 'give a list of texts such as ["a", "b"]')
    return tuple(valid_text(item) for item in value)


def _rates(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or not value:
        raise InvalidValue(f"is {quote(value)}", f"give a table of {', '.join(GPU_PRECISIONS)}")
    for precision in value:
        if precision not in GPU_PRECISIONS:
            raise InvalidValue(
                f"has no precision {quote(precision)}", nearest(precision, GPU_PRECISIONS)
            )
    return {key: valid_number(rate, None, 0.0, None, None) for key, rate in value.items()}
