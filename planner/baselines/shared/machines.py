"""The machines of a cluster that are up, and single bandwidths between them, as planners need."""

from __future__ import annotations

import math
from collections.abc import Iterable

from planner.compare.interface import Case
from simulator.cluster.cluster import Cluster
from simulator.spec.plan import Place

PROBE_BYTES = 2.0**26
"""Message size at which a planner's single bandwidth per link is measured, unless it is given."""


def machines_of(cluster: Cluster) -> list[tuple[Place, int]]:
    """Place and number of GPUs of each machine, by GPU kind, zone and machine type."""
    pools = sorted(cluster.pools, key=lambda pool: (pool.gpu, pool.zone, pool.machine, pool.spot))
    found: list[tuple[Place, int]] = []
    for pool in pools:
        for size, count in pool.machines(pool.gpus):
            found += [(pool.place, size)] * count
    return found


def slowest_bytes_per_s(
    case: Case, places: Iterable[Place], *, message_bytes: float = PROBE_BYTES
) -> float:
    """The bandwidth of the slowest pair, a place with itself included."""
    named = tuple(dict.fromkeys(places))
    return min(
        bytes_per_s_between(case, one, other, message_bytes=message_bytes)
        for one in named
        for other in named
    )


def bytes_per_s_between(
    case: Case, sender: Place, receiver: Place, *, message_bytes: float = PROBE_BYTES
) -> float:
    """The single bandwidth of a link between two machines."""
    seconds = case.network.between_nodes(sender, receiver, flows=1, bytes_each=message_bytes)
    return message_bytes / seconds


def bytes_per_s_within(
    case: Case, place: Place, *, gpus: int = 2, message_bytes: float = PROBE_BYTES
) -> float:
    """The single bandwidth of a link between GPUs of a machine."""
    seconds = case.network.within_node(place, gpus=gpus, bytes_each=message_bytes)
    return message_bytes / seconds if seconds > 0 else math.inf
