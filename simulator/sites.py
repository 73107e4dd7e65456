"""What a place offers: devices per machine, memory and price."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.cluster import Cluster
from simulator.network import Measured
from simulator.plan import Place


@dataclass(frozen=True, slots=True, eq=False)
class Sites:
    """Looks up places of one cluster; a measured network's facts win over the catalogue's."""

    cluster: Cluster
    measured: Measured

    def gpus_per_machine(self, place: Place) -> int:
        pool = self.cluster.pool_of(place.gpu, place.machine, place.zone)
        if pool is not None:
            return pool.gpus_per_machine
        known = self.measured.gpus_per_node.get(place.gpu)
        return known or self.cluster.catalogue.machine(place.machine).gpus

    def capacity_bytes(self, place: Place) -> float:
        """What the driver hands out of one device."""
        return float(self.cluster.catalogue.gpu(place.gpu).usable_memory_bytes)

    def price_usd_per_gpu_hour(self, place: Place) -> float | None:
        """The pool's price; a price of the cluster file wins over all others."""
        pool = self.cluster.pool_of(place.gpu, place.machine, place.zone)
        if pool is not None and pool.price_source not in ("catalogue", "unknown"):
            return pool.price_usd_per_gpu_hour
        measured = self.measured.price_usd_per_gpu_hour.get((place.gpu, place.zone))
        if measured is not None:
            return measured
        return pool.price_usd_per_gpu_hour if pool is not None else None
