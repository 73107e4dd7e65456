"""Splits the GPUs of a plan into Spot and on-demand machines, as the configured mix wants it.

A plan names zones and machine types; which of the machines are Spot is decided here. A mix may
demand a minimum of on-demand machines, so that one wave of preemptions does not take everything,
and may hold back the rest of on-demand until Spot was unavailable for a while.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sailord.planning.messages import PoolSupply
from sailord.planning.mix import Mix

Place = tuple[str, str, str]
"""GPU kind, machine type and zone: what a plan names."""


def hold_back_on_demand(
    pools: Sequence[PoolSupply], mix: Mix, is_out: Callable[[PoolSupply], bool]
) -> tuple[PoolSupply, ...]:
    """Limit what the on-demand pools offer to what the mix allows at present.

    ``is_out`` says whether a Spot pool has had nothing for as long as the mix waits.
    """
    if mix.on_demand_after_s is None:
        return tuple(pools)
    spot = [pool for pool in pools if pool.spot]
    short = {p.gpu for p in pools} - {p.gpu for p in spot if not is_out(p)}
    room = _on_demand_needed(pools, mix)
    found = list(pools)
    held_back = [i for i, p in enumerate(pools) if not p.spot and p.gpu not in short]
    for index in sorted(held_back, key=lambda i: _usd_per_gpu(pools[i])):
        count = min(pools[index].obtainable, room)
        found[index] = replace(pools[index], obtainable=count)
        room -= count
    return tuple(found)


def _on_demand_needed(pools: Sequence[PoolSupply], mix: Mix) -> int:
    """How many more on-demand machines the minimum would need if all Spot machines came."""
    spot = sum(pool.up + pool.obtainable for pool in pools if pool.spot)
    there = sum(pool.up for pool in pools if not pool.spot)
    most = there + sum(pool.obtainable for pool in pools if not pool.spot)
    enough = (n for n in range(mix.on_demand_min, most) if n >= mix.least(spot + n))
    return max(next(enough, most) - there, 0)


def _usd_per_gpu(pool: PoolSupply) -> float:
    return math.inf if pool.usd_per_hour is None else pool.usd_per_hour / pool.gpus


def split_by_pool(
    gpus: Mapping[Place, int], pools: Sequence[PoolSupply], mix: Mix
) -> tuple[int, ...]:
    """Machines of each pool that hold the plan's GPUs.

    The on-demand minimum first; then machines that are up before new ones, and Spot first among
    each. Without a mix on-demand comes first, since plans are priced so.
    """
    left, counts = Counter(gpus), [0] * len(pools)
    total = sum(math.ceil(left[place] / size) for place, size in _sizes(pools).items())
    least = mix.least(total)

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
    order = sorted(range(len(pools)), key=lambda i: pools[i].spot != mix.prefers_spot)
    for index in order:
        take(index, pools[index].up - counts[index])
    for index in order:
        pool = pools[index]
        take(index, pool.up + pool.obtainable - counts[index])
    return tuple(counts)


def _sizes(pools: Sequence[PoolSupply]) -> dict[Place, int]:
    """GPUs per machine, by place."""
    return {(p.gpu, p.machine, p.zone): p.gpus for p in pools}
