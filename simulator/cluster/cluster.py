"""A cluster: pools of machines by type and zone, quotas and limits between zones."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.hardware.catalogue import Catalogue
from simulator.spec.plan import Located, PlaceKey

Machines = tuple[tuple[int, int], ...]
"""Pairs (GPUs of a machine, number of such machines)."""


@dataclass(frozen=True, slots=True)
class Pool(Located):
    """Machines of one type in one zone under one contract (on demand or spot)."""

    zone: str
    gpu: str
    machine: str
    """Name of the machine type, or ``"<gpu>x<n>"`` in a pool that names only a GPU kind."""
    gpus_per_machine: int
    gpus: int
    """GPUs that are up; the last machine may be smaller than the others."""
    obtainable_gpus: int = 0
    """GPUs that could be rented in addition."""
    spot: bool = False
    price_usd_per_gpu_hour: float | None = None
    """``None`` if neither the cluster file nor the catalogue has a price."""
    price_source: str = "unknown"

    def machines(self, gpus: int) -> Machines:
        """Return the machines of ``gpus`` GPUs of the pool: whole ones, and one for the rest."""
        whole, rest = divmod(gpus, self.gpus_per_machine)
        found = (self.gpus_per_machine, whole), (rest, 1)
        return tuple((size, count) for size, count in found if size and count)


@dataclass(frozen=True, slots=True)
class Quota:
    """The most GPUs of a kind that may be used in a zone or region."""

    where: str
    gpu: str
    gpus_max: int


@dataclass(frozen=True, slots=True)
class ZoneLink:
    """The bandwidth limit of all flows from one zone to another."""

    from_zone: str
    to_zone: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Pools, quotas and zone links, with the catalogue that they refer to."""

    pools: tuple[Pool, ...]
    catalogue: Catalogue
    zone_regions: tuple[tuple[str, str], ...] = ()
    """Zones that the cluster file declares, with their regions."""
    quotas: tuple[Quota, ...] = ()
    zone_links: tuple[ZoneLink, ...] = ()
    pays_spot_first: bool = False
    """Whether plans that name no nodes pay the spot GPUs of a place before those on demand."""

    def region_of(self, zone: str) -> str | None:
        """Return a zone's region: as the cluster file declares it, else the catalogue's."""
        return dict(self.zone_regions).get(zone, self.catalogue.zones.get(zone))

    def pools_of(self, key: PlaceKey) -> tuple[Pool, ...]:
        """Return the pools that supply a place, in the order in which they are paid."""
        here = (pool for pool in self.pools if pool.key == key)
        return tuple(sorted(here, key=lambda pool: pool.spot != self.pays_spot_first))
