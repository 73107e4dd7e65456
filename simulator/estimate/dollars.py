"""Dollars: what the devices cost while an iteration lasts, and what leaves a zone in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from simulator.estimate.result import Money
from simulator.spec.plan import Place

UsdPerHour = Callable[[Place, int], float | None]
"""What so many GPUs of a place cost by the hour; ``None`` where a price is unknown."""


def usd_per_hour_by_pool(
    devices: Mapping[Place, int], usd_per_hour: UsdPerHour
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Dollars per hour of devices by their place, and the pools without a known price."""
    by_pool: defaultdict[str, float] = defaultdict(float)
    unpriced: set[str] = set()
    for place, count in devices.items():
        name = f"{place.gpu}@{place.zone}"
        usd = usd_per_hour(place, count)
        if usd is None:
            unpriced.add(name)
        else:
            by_pool[name] += usd
    return dict(sorted(by_pool.items())), tuple(sorted(unpriced))


def iteration_money(
    devices: Mapping[Place, int],
    *,
    iteration_s: float,
    usd_per_hour: UsdPerHour,
    egress_bytes: Mapping[tuple[str, str], float],
    egress_usd_per_byte: Callable[[str, str], float],
) -> Money:
    """Dollars of one iteration: devices by the hour, bytes by where they go."""
    by_pool, unpriced = usd_per_hour_by_pool(devices, usd_per_hour)
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
