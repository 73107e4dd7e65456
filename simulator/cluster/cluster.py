"""A cluster: which machines of which kind are up in which zone, and what more could be had."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.hardware.catalogue import Catalogue


@dataclass(frozen=True, slots=True)
class Pool:
    """Machines of one type in one zone under one contract (on demand or spot)."""

    zone: str
    gpu: str
    machine: str
    """Name of the machine type; of a pool that names just a GPU kind, ``"<gpu>x<n>"``."""
    gpus_per_machine: int
    gpus: int
    """GPUs that are up; the last machine may be smaller than the others."""
    obtainable_gpus: int = 0
    spot: bool = False
    price_usd_per_gpu_hour: float | None = None
    """What the user pays; ``None`` where neither the file nor the catalogue knows a price."""
    price_source: str = "unknown"

    @property
    def machine_count(self) -> int:
        return -(-self.gpus // self.gpus_per_machine)


@dataclass(frozen=True, slots=True)
class Quota:
    """Most GPUs of a kind that a zone or region grants."""

    where: str
    gpu: str
    gpus_max: int


@dataclass(frozen=True, slots=True)
class ZoneLink:
    """A limit on what all flows from one zone to another carry together."""

    from_zone: str
    to_zone: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Pools, quotas and the regions of their zones, on top of a catalogue of facts."""

    pools: tuple[Pool, ...]
    catalogue: Catalogue
    zone_regions: tuple[tuple[str, str], ...] = ()
    """Zones that the cluster file declares by itself, with their regions."""
    quotas: tuple[Quota, ...] = ()
    zone_links: tuple[ZoneLink, ...] = ()

    def pools_of(self, gpu: str, machine: str, zone: str) -> tuple[Pool, ...]:
        """The pools that a stage's place draws from, in their order: on demand before spot."""
        here = [
            pool
            for pool in self.pools
            if (pool.gpu, pool.machine, pool.zone) == (gpu, machine, zone)
        ]
        return tuple(sorted(here, key=lambda pool: pool.spot))
