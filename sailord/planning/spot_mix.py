"""Spot and on demand, mixed as a person wants it: how many of which contract, pure sums.

A plan names places, not contracts: which machines of a place are Spot is settled here. Two things
may be asked for. So many machines, or such a share of them, are to be on demand, so that no wave
of preemptions takes everything; and what is on demand beyond that is to wait until Spot could not
be had for a while.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sailord.planning.mix import Mix

if TYPE_CHECKING:
    from sailord.planning.pool import WantedPool

Place = tuple[str, str, str]
"""GPU kind, machine type and zone: what a plan names."""


def restrained(
    pools: Sequence[WantedPool], mix: Mix, is_out: Callable[[WantedPool], bool]
) -> tuple[WantedPool, ...]:
    """The same pools, with no more on demand to be had than the mix leaves room for.

    ``is_out`` says of a Spot pool that it had nothing for as long as the mix waits.
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


def _on_demand_needed(pools: Sequence[WantedPool], mix: Mix) -> int:
    """How many more on demand the minimum could ask for, if all Spot machines came."""
    spot = sum(pool.up + pool.obtainable for pool in pools if pool.spot)
    there = sum(pool.up for pool in pools if not pool.spot)
    most = there + sum(pool.obtainable for pool in pools if not pool.spot)
    enough = (n for n in range(mix.on_demand_min, most) if n >= mix.least(spot + n))
    return max(next(enough, most) - there, 0)


def _usd_per_gpu(pool: WantedPool) -> float:
    return math.inf if pool.usd_per_hour is None else pool.usd_per_hour / pool.gpus


def shared_out(gpus: Mapping[Place, int], pools: Sequence[WantedPool], mix: Mix) -> tuple[int, ...]:
    """How many machines of each pool hold so many GPUs of each place.

    First what has to be on demand; then what is up before what is not, and of either kind Spot
    first, unless nobody asked for a mix: then on demand, as plans are priced.
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


def _sizes(pools: Sequence[WantedPool]) -> dict[Place, int]:
    """GPUs of one machine, by place."""
    return {(p.gpu, p.machine, p.zone): p.gpus for p in pools}
