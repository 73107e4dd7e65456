"""Smaller clusters that a planner's users would try: fewer kinds, zones or machines.

Most planners of the literature use all GPUs that they are given. Their users would not: they leave
out the far zone or the slow kind where that is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from simulator.cluster.cluster import Cluster, Pool

SHARES = (Fraction(1), Fraction(1, 2), Fraction(1, 4))
"""Shares of each pool's machines."""
TRIED_MAX = 24


def sub_clusters(cluster: Cluster) -> tuple[Cluster, ...]:
    """The cluster, and parts of it, largest share of the machines first; each once."""
    found: dict[tuple[Pool, ...], None] = {}
    for share in SHARES:
        for pools in _parts(cluster.pools):
            some = (_with_share(pool, share) for pool in pools)
            found[tuple(pool for pool in some if pool.gpus)] = None
    parts = [pools for pools in found if pools]
    return tuple(replace(cluster, pools=pools) for pools in parts[:TRIED_MAX])


def _parts(pools: tuple[Pool, ...]) -> Iterator[tuple[Pool, ...]]:
    """All pools; those of one kind or zone; all but those of one; each alone."""
    yield pools
    for names in ([pool.gpu for pool in pools], [pool.zone for pool in pools]):
        for name in dict.fromkeys(names):
            named = list(zip(pools, names, strict=True))
            yield tuple(pool for pool, other in named if other == name)
            yield tuple(pool for pool, other in named if other != name)
    for pool in pools:
        yield (pool,)


def _with_share(pool: Pool, share: Fraction) -> Pool:
    """The pool with a share of its machines, rounded down to whole ones."""
    if share == 1:
        return pool
    machines = int(pool.gpus // pool.gpus_per_machine * share)
    return replace(pool, gpus=machines * pool.gpus_per_machine)
