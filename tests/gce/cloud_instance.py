"""Instances of the simulated cloud, its pools, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass

from sailord.providers.interface import Instance, Pool

ZONES = ("zone-a", "zone-b", "zone-c")
POOLS = tuple(
    Pool(zone, machine, gpu, gpus, spot)
    for zone in ZONES
    for machine, gpu, gpus in (("small-1g", "small", 1), ("large-4g", "large", 4))
    for spot in (False, True)
)
PRICES = {p: (1.0 if p.gpus == 1 else 9.0) * (0.4 if p.spot else 1.0) for p in POOLS}
FLEX = Pool("zone-a", "large-4g", "large", 4, spot=False, flex=True)
"""Its requests wait; only ``queueing_cloud`` has it."""
PRICES[FLEX] = 5.0


@dataclass(eq=False)
class CloudInstance:
    """The cloud's view of one of its instances."""

    instance: Instance
    ends_at: float | None = None
    joins_at: float = float("inf")
    dies_at: float = float("inf")
    """Time from which its agent is silent."""
    gpus: int = 0


def cost(rented: CloudInstance, now: float) -> float:
    """Return the dollars that an instance has cost."""
    seconds = (rented.ends_at or now) - rented.instance.created_at
    return PRICES[rented.instance.pool] * seconds / 3600


def hash_of(name: str) -> int:
    """The same in every process."""
    return int(name[1:]) * 2654435761 % 2**32
