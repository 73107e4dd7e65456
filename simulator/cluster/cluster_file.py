"""Reads cluster files: pools, quotas and zone links, checked against the catalogue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from simulator.cluster.cluster import Cluster, Pool, Quota, ZoneLink
from simulator.documents.fields import InvalidValue, Table, open_table, valid_text
from simulator.documents.files import Document, load_document
from simulator.documents.problems import InputError, Problems, nearest
from simulator.hardware.catalogue import Catalogue, load_catalogue
from simulator.hardware.types import MachineType

T = TypeVar("T")

BYTES_PER_GBIT = 1e9 / 8
GPUS_MAX = 10**7
"""Far above any cluster; more is a typing error."""


def load_cluster(path: Path | str) -> Cluster:
    """Read a cluster file, and the catalogue file that it names, if any."""
    return cluster_from_document(load_document(path, flaws_raise=False))


def cluster_from_document(document: Document, *, catalogue: Catalogue | None = None) -> Cluster:
    """Read a cluster; a catalogue file that it names is relative to the document's folder."""
    problems = Problems()
    top = open_table(document, problems)
    catalogue = _catalogue(top, given=catalogue)
    zones = _zones(top, catalogue)
    facts = _KnownNames(catalogue, zones)
    if "pool" not in top:
        cure = "give zone, machine and machines, or zone, gpu and gpus"
        problems.add(document.name, "holds no [[pool]]", cure)
    pools = [_pool(table, facts) for table in top.tables("pool")]
    quotas = [_quota(table, facts) for table in top.tables("quota")]
    links = [_zone_link(table, facts) for table in top.tables("zone_link")]
    top.finish()
    _check_duplicates(pools, links, problems)
    problems.raise_if_any()
    return Cluster(
        pools=tuple(pool for read in pools if read is not None for pool in (read.pool, *read.left)),
        catalogue=catalogue,
        zone_regions=tuple(zones.items()),
        quotas=tuple(quota for quota in quotas if quota is not None),
        zone_links=tuple(read.link for read in links if read is not None),
    )


def _catalogue(top: Table, given: Catalogue | None) -> Catalogue:
    named = top.text("catalogue")
    if named is None:
        return given or load_catalogue()
    try:
        return load_catalogue(top.document.folder / named)
    except InputError as error:
        top.problems.take(error, place=f"{top.place_of('catalogue')}:")
    return given or load_catalogue()


def _zones(top: Table, catalogue: Catalogue) -> dict[str, str]:
    """Read the zones that the file declares, with their regions."""
    zones: dict[str, str] = {}
    for table in top.tables("zone"):
        name, region = table.text("name", required=True), table.text("region", required=True)
        table.finish()
        if name is None or region is None:
            continue
        if name in zones:
            table.report("name", f'"{name}" is declared twice', "keep one of the two")
        elif catalogue.zones.get(name, region) != region:
            what = f'zone "{name}" is in region "{catalogue.zones[name]}" in the catalogue'
            table.report("region", what, "give that region, or rename the zone")
        zones[name] = region
    return zones


@dataclass(frozen=True, slots=True)
class _KnownNames:
    """Resolves the zones, GPUs and machine types that a cluster file names."""

    catalogue: Catalogue
    zones: Mapping[str, str]

    def zone(self, value: Any) -> str:
        zone = valid_text(value)
        _resolve(lambda: self.catalogue.zone_region(zone, self.zones))
        return zone

    def gpu(self, value: Any) -> str:
        name = valid_text(value)
        return _resolve(lambda: self.catalogue.gpu_name(name))

    def machine(self, value: Any) -> MachineType:
        name = valid_text(value)
        return _resolve(lambda: self.catalogue.machine(name))

    def zone_or_region(self, value: Any) -> str:
        name = valid_text(value)
        catalogue = self.catalogue
        known = {*catalogue.zones, *self.zones, *catalogue.regions, *self.zones.values()}
        if name not in known:
            raise InvalidValue(f'no zone or region "{name}" is known', nearest(name, known))
        return name


def _resolve(question: Callable[[], T]) -> T:
    """Look a name up, turning the catalogue's ``InputError`` into an invalid value."""
    try:
        return question()
    except InputError as error:
        problem = error.problems[0]
        raise InvalidValue(problem.what, problem.cure) from None


@dataclass(frozen=True, slots=True)
class _ReadPool:
    table: Table
    pool: Pool
    left: tuple[Pool, ...] = ()
    """Its machines that lost GPUs, the largest first: a pool for each number of GPUs left."""


@dataclass(frozen=True, slots=True)
class _ReadLink:
    table: Table
    link: ZoneLink


def _pool(table: Table, facts: _KnownNames) -> _ReadPool | None:
    found_before = len(table.problems.found)
    zone = table.value("zone", facts.zone, required=True)
    kind = _kind(table, facts)
    gpus = _count(table, kind, "machines", "gpus", required=True)
    obtainable = _count(table, kind, "obtainable", "obtainable_gpus", required=False)
    left = table.integers("gpus_left") or ()
    for index, count in enumerate(left):
        if kind is not None and count >= kind.gpus_per_machine:
            what = f"is {count}, and its machines have {kind.gpus_per_machine} GPUs"
            table.problems.add(
                table.place_of("gpus_left", index), what, "count whole ones as machines"
            )
    spot = table.flag("spot", default=False)
    price = table.number("price_usd_per_gpu_hour", least=0)
    table.finish()
    if gpus == 0 and obtainable == 0 and not left:
        cure = "remove the pool, or set obtainable to the number of machines that can be rented"
        table.problems.add(table.place, "has no GPU and none is obtainable", cure)
    if zone is None or kind is None or gpus is None or obtainable is None:
        return None
    if len(table.problems.found) > found_before:
        return None
    source = table.document.name if price is not None else "unknown"
    if price is None:
        price = facts.catalogue.price_usd_per_gpu_hour(
            kind.gpu if kind.machine_type is None else kind.machine_type.name,
            zone=zone,
            spot=spot,
            gpus_per_machine=kind.gpus_per_machine,
            extra_regions=facts.zones,
        )
        source = "unknown" if price is None else "catalogue"
    pool = Pool(
        zone=zone,
        gpu=kind.gpu,
        machine=kind.name,
        gpus_per_machine=kind.gpus_per_machine,
        gpus=gpus,
        obtainable_gpus=obtainable,
        spot=spot,
        price_usd_per_gpu_hour=price,
        price_source=source,
    )
    sizes = Counter(left)
    return _ReadPool(
        table,
        pool,
        tuple(
            replace(pool, gpus_per_machine=size, gpus=size * sizes[size], obtainable_gpus=0)
            for size in sorted(sizes, reverse=True)
        ),
    )


@dataclass(frozen=True, slots=True)
class _MachineKind:
    """The machines of a pool: a machine type, or a GPU kind and the GPUs per machine."""

    gpu: str
    gpus_per_machine: int
    machine_type: MachineType | None

    @property
    def name(self) -> str:
        if self.machine_type is not None:
            return self.machine_type.name
        return f"{self.gpu}x{self.gpus_per_machine}"


def _kind(table: Table, facts: _KnownNames) -> _MachineKind | None:
    size = table.integer("gpus_per_machine")
    gpu = table.value("gpu", facts.gpu)
    machine = table.value("machine", facts.machine)
    if "machine" not in table:
        if "gpu" not in table:
            cure = 'give machine = "..." from the catalogue, or gpu = "..."'
            table.problems.add(table.place, "names neither a machine nor a gpu", cure)
        if gpu is None:
            return None
        return _MachineKind(gpu, size or default_machine_size(gpu, facts.catalogue), None)
    if machine is None:
        return None
    for key, given, known in (("gpu", gpu, machine.gpu), ("gpus_per_machine", size, machine.gpus)):
        if given is not None and given != known:
            what = f"is {given}, but {machine.name} has {known}"
            table.report(key, what, "leave it out, or leave the machine out")
    return _MachineKind(machine.gpu, machine.gpus, machine)


def default_machine_size(gpu: str, catalogue: Catalogue) -> int:
    """Return the GPUs per machine to assume where a file names only a GPU kind.

    The size of the catalogue's largest machine with at most eight of them, else of its smallest
    one; 1 if no machine type has the kind.
    """
    sizes = [machine.gpus for machine in catalogue.machines_for(gpu)]
    return max((size for size in sizes if size <= 8), default=min(sizes, default=1))


def _count(
    table: Table, kind: _MachineKind | None, machines_key: str, gpus_key: str, *, required: bool
) -> int | None:
    """Read a number of GPUs, given as machines or as GPUs; ``None`` if it is wrong."""
    machines = table.integer(machines_key, least=0, most=GPUS_MAX)
    gpus = table.integer(gpus_key, least=0, most=GPUS_MAX)
    if machines_key in table and gpus_key in table:
        table.report(gpus_key, f"is given together with {machines_key}", "keep one of the two")
        return None
    if machines_key in table:
        return None if machines is None or kind is None else machines * kind.gpus_per_machine
    if gpus_key in table:
        return gpus
    if not required:
        return 0
    cure = f"give {machines_key} = ... or {gpus_key} = ..., 0 if none is up"
    table.problems.add(table.place, "gives no number of machines or GPUs", cure)
    return None


def _quota(table: Table, facts: _KnownNames) -> Quota | None:
    where = table.value("where", facts.zone_or_region, required=True)
    gpu = table.value("gpu", facts.gpu, required=True)
    gpus_max = table.integer("gpus_max", least=0, most=GPUS_MAX, required=True)
    table.finish()
    if where is None or gpu is None or gpus_max is None:
        return None
    return Quota(where, gpu, gpus_max)


def _zone_link(table: Table, facts: _KnownNames) -> _ReadLink | None:
    from_zone = table.value("from_zone", facts.zone, required=True)
    to_zone = table.value("to_zone", facts.zone, required=True)
    gbit_per_s = table.number("gbit_per_s", above=0, required=True)
    table.finish()
    if from_zone is None or to_zone is None or gbit_per_s is None:
        return None
    if from_zone == to_zone:
        table.report("to_zone", f'is "{to_zone}" as well', "a link joins two zones")
        return None
    return _ReadLink(table, ZoneLink(from_zone, to_zone, gbit_per_s * BYTES_PER_GBIT))


def _check_duplicates(
    pools: list[_ReadPool | None], links: list[_ReadLink | None], problems: Problems
) -> None:
    """Report pools and links that are given twice."""
    seen_pools: dict[tuple[str, str, bool], str] = {}
    for read in pools:
        if read is None:
            continue
        pool = read.pool
        first = seen_pools.setdefault((pool.zone, pool.machine, pool.spot), read.table.place)
        if first != read.table.place:
            what = f"repeats {pool.machine} in {pool.zone}"
            problems.add(read.table.place, what, "merge the two into one pool")
    seen_links: dict[tuple[str, str], str] = {}
    for link in links:
        if link is None:
            continue
        pair = (link.link.from_zone, link.link.to_zone)
        if seen_links.setdefault(pair, link.table.place) != link.table.place:
            what = f"repeats the link from {pair[0]} to {pair[1]}"
            problems.add(link.table.place, what, "keep one of the two")
