"""Variants of a cluster: with fewer spot GPUs, or with spot GPUs paid before on-demand ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from planner.problem.objective import Limits
from simulator.cluster.cluster import Cluster
from simulator.cluster.place_facts import PlaceFacts
from simulator.spec.plan import PlaceKey

ALONE_MAX = 2
"""Most spot pools that are tried alone, the largest first."""


def paying_spot_first(cluster: Cluster, limits: Limits, facts: PlaceFacts) -> Cluster | None:
    """The cluster on which plans pay spot GPUs before those on demand.

    ``None``: there is no limit in dollars, no place where spot costs less, or a limit on the share
    of spot, or they pay spot first already.
    """
    share = limits.objective.max_spot_share
    if not limits.caps_dollars or (share is not None and share < 1) or cluster.pays_spot_first:
        return None
    steady: dict[PlaceKey, float] = {}
    spot: dict[PlaceKey, float] = {}
    for pool in cluster.pools:
        usd = facts.pool_price_usd(pool)
        if pool.gpus and usd is not None:
            (spot if pool.spot else steady)[pool.key] = usd
    if not any(spot[key] < usd for key, usd in steady.items() if key in spot):
        return None
    return replace(cluster, pays_spot_first=True)


def with_less_spot(cluster: Cluster, share: float | None) -> Iterator[Cluster]:
    """The cluster with few enough spot GPUs that a plan on all its GPUs keeps a share of spot.

    A plan within the share has at most ``share / (1 - share)`` spot GPUs for each one on demand.
    They are left in all spot pools together, then in one of the largest, then in none.
    """
    spot = {n: pool.gpus for n, pool in enumerate(cluster.pools) if pool.spot and pool.gpus}
    steady = sum(pool.gpus for pool in cluster.pools if not pool.spot)
    if share is None or share >= 1 or not spot or not steady:
        return
    most = math.floor(steady * share / (1 - share) + 1e-9)
    left = [_deal_in_proportion(spot, most)]
    largest = sorted(spot, key=lambda n: (-spot[n], n))[:ALONE_MAX]
    left += [{n: min(spot[n], most)} for n in largest]
    left.append({})
    seen = [spot]
    for gpus in left:
        kept = {n: count for n, count in gpus.items() if count}
        if kept in seen:
            continue
        seen.append(kept)
        pools = (
            replace(pool, gpus=kept.get(n, 0)) if pool.spot else pool
            for n, pool in enumerate(cluster.pools)
        )
        yield replace(cluster, pools=tuple(pools))


def _deal_in_proportion(gpus: dict[int, int], most: int) -> dict[int, int]:
    """Deal ``most`` GPUs to pools in proportion; the largest pools get what is left over."""
    total = sum(gpus.values())
    if total <= most:
        return gpus
    dealt = {n: most * count // total for n, count in gpus.items()}
    for n in sorted(gpus, key=lambda n: (-gpus[n], n))[: most - sum(dealt.values())]:
        dealt[n] += 1
    return dealt
