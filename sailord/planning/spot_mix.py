"""Splits the GPUs of a plan into Spot and on-demand machines.

A plan names zones and machine types; which of the machines are Spot is decided here. A minimum may
be on demand, so that one wave of preemptions does not take everything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from sailord.planning.messages import PoolSupply

MixPlace = tuple[str, str, str]
"""GPU kind, machine type and zone: what a plan names."""


def split_by_pool(
    gpus: Mapping[MixPlace, int],
    pools: Sequence[PoolSupply],
    on_demand_min: int,
    *,
    spot_first: bool = False,
) -> tuple[int, ...]:
    """Machines of each pool that hold the plan's GPUs.

    The on-demand minimum first; then machines that are up before new ones, and Spot first among
    each. Without a minimum on-demand comes first, unless the plan is priced with Spot first. What
    waits in a queue comes last.
    """
    left, counts = Counter(gpus), [0] * len(pools)
    least = on_demand_min

    def take(index: int, at_most: int) -> int:
        pool = pools[index]
        place = (pool.gpu, pool.machine, pool.zone)
        count = max(min(math.ceil(left[place] / pool.gpus), at_most), 0)
        counts[index] += count
        left[place] -= min(count * pool.gpus, left[place])
        return count

    on_demand = sorted((i for i, p in enumerate(pools) if not p.spot), key=lambda i: -pools[i].up)
    for index in on_demand:
        pool = pools[index]
        least -= take(index, min(least, pool.up + pool.obtainable))
    is_spot_first = spot_first or on_demand_min > 0
    order = sorted(range(len(pools)), key=lambda i: (pools[i].flex, pools[i].spot != is_spot_first))
    for index in order:
        take(index, pools[index].up - counts[index])
    for index in order:
        pool = pools[index]
        take(index, pool.up + pool.obtainable - counts[index])
    return tuple(counts)
