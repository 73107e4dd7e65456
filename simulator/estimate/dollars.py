"""Dollars per iteration: devices while it lasts, and egress between zones."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from simulator.estimate.result import Money
from simulator.spec.plan import Place

UsdPerHour = Callable[[Place, int, bool | None], float | None]
"""Price per hour of a number of GPUs of a place, and whether they are spot GPUs, where that is
known; ``None`` if the price is unknown."""


def usd_per_hour_by_pool(
    devices: Mapping[Place, int], spot: Mapping[str, bool], usd_per_hour: UsdPerHour
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return dollars per hour of devices by pool, and the pools without a known price.

    ``spot`` tells by id which nodes are spot nodes; devices elsewhere have no known contract.
    """
    counts: Counter[tuple[Place, bool | None]] = Counter()
    for place, count in devices.items():
        contract = None if place.node is None else spot.get(place.node)
        counts[place.without_node, contract] += count
    by_pool: defaultdict[str, float] = defaultdict(float)
    unpriced: set[str] = set()
    for (place, contract), count in counts.items():
        name = f"{place.gpu}@{place.zone}"
        usd = usd_per_hour(place, count, contract)
        if usd is None:
            unpriced.add(name)
        else:
            by_pool[name] += usd
    return dict(sorted(by_pool.items())), tuple(sorted(unpriced))


def iteration_money(
    devices: Mapping[Place, int],
    *,
    iteration_s: float,
    spot: Mapping[str, bool],
    usd_per_hour: UsdPerHour,
    egress_bytes: Mapping[tuple[str, str], float],
    egress_usd_per_byte: Callable[[str, str], float],
) -> Money:
    """Return the dollars of one iteration for devices and egress."""
    by_pool, unpriced = usd_per_hour_by_pool(devices, spot, usd_per_hour)
    compute = {name: usd * iteration_s / 3600 for name, usd in by_pool.items()}
    egress = {
        f"{source} -> {target}": size * egress_usd_per_byte(source, target)
        for (source, target), size in sorted(egress_bytes.items())
        if source != target
    }
    return Money(
        compute_usd=None if unpriced else sum(compute.values()),
        egress_usd=sum(egress.values()),
        by_pool_usd=tuple(compute.items()),
        by_egress_usd=tuple(egress.items()),
        unpriced=unpriced,
    )
