"""Devices per machine, memory and price of a place."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.cluster.cluster import Cluster, Machines, Pool
from simulator.network.network import MeasuredNetwork
from simulator.spec.plan import Place


@dataclass(frozen=True, slots=True, eq=False)
class PlaceFacts:
    """Looks up places of one cluster; values of a network file override the catalogue's."""

    cluster: Cluster
    measured: MeasuredNetwork

    def gpus_per_machine(self, place: Place) -> int:
        """Return the GPUs of the largest machine that is up, or else of the largest pool."""
        pools = self._pools(place)
        if pools:
            up = [min(pool.gpus, pool.gpus_per_machine) for pool in pools if pool.gpus]
            return max(up or (pool.gpus_per_machine for pool in pools))
        known = self.measured.gpus_per_node.get(place.gpu)
        return known or self.cluster.catalogue.machine(place.machine).gpus

    def machines(self, place: Place, gpus: int) -> Machines:
        """Return the machines that ``gpus`` GPUs may take, in this order.

        First come those that are up, the largest first, then obtainable ones if these are too few.
        At the end come enough of the largest size for all GPUs.
        """
        pools = self._pools(place)
        found = sorted(some for pool in pools for some in pool.machines(pool.gpus))[::-1]
        if sum(size * count for size, count in found) < gpus:
            more = (some for pool in pools for some in pool.machines(pool.obtainable_gpus))
            found += sorted(more)[::-1]
        largest = max((size for size, _ in found), default=self.gpus_per_machine(place))
        return (*found, (largest, gpus))

    def capacity_bytes(self, place: Place) -> float:
        """Return the usable memory of one device."""
        return float(self.cluster.catalogue.gpu(place.gpu).usable_memory_bytes)

    def host_bytes_per_gpu(self, place: Place) -> float | None:
        """Return each GPU's share of its machine's own memory, or ``None`` if it is unknown."""
        machine = self.cluster.catalogue.machine(place.machine)
        whole = machine.host_memory_bytes
        return None if whole is None else whole / machine.gpus

    def price_usd_per_gpu_hour(self, place: Place) -> float | None:
        """Return the lowest price of the pools here, or ``None`` if any of them is unknown.

        Pools with GPUs that are up count, else those with obtainable ones, else all.
        """
        pools = self._pools(place)
        counting = [pool for pool in pools if pool.gpus] or [p for p in pools if p.obtainable_gpus]
        found = [self.pool_price_usd(pool) for pool in counting or pools]
        prices = [usd for usd in found if usd is not None]
        if not found:
            return self.measured.price_usd_per_gpu_hour.get((place.gpu, place.zone))
        return min(prices) if len(prices) == len(found) else None

    def usd_per_hour(self, place: Place, gpus: int, spot: bool | None = None) -> float | None:
        """Return the price of several GPUs of one contract; ``None`` if it is unknown.

        If the contract is unknown, pools are charged in the cluster's order, on demand before spot
        as a rule, and GPUs that are up before obtainable ones.
        """
        pools = self._pools(place)
        if not pools:
            usd = self.price_usd_per_gpu_hour(place)
            return None if usd is None else usd * gpus
        pools = tuple(pool for pool in pools if spot in (None, pool.spot))
        supply = [(pool, pool.gpus) for pool in pools]
        supply += [(pool, pool.obtainable_gpus) for pool in pools]
        # GPUs beyond these count at the price of the last pool.
        supply += [(pool, gpus) for pool in pools[-1:]]
        total, left = 0.0, gpus
        for pool, most in supply:
            taken = min(left, most)
            usd = self.pool_price_usd(pool)
            if usd is None and taken:
                return None
            total += taken * (usd or 0.0)
            left -= taken
        return None if left else total

    def _pools(self, place: Place) -> tuple[Pool, ...]:
        return self.cluster.pools_of(place.key)

    def pool_price_usd(self, pool: Pool) -> float | None:
        """Return a pool's price: the cluster file's, else the network's, else the catalogue's."""
        if pool.price_source not in ("catalogue", "unknown"):
            return pool.price_usd_per_gpu_hour
        measured = self.measured.price_usd_per_gpu_hour.get((pool.gpu, pool.zone))
        return pool.price_usd_per_gpu_hour if measured is None else measured
