"""The GPUs that a plan may use: lots (GPUs of one kind in one zone), quotas, and what fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from simulator.cluster.cluster import Cluster, Machines
from simulator.cluster.place_facts import PlaceFacts
from simulator.documents.problems import Problem
from simulator.inputs.supply_check import groups_by_place, pools_by_place
from simulator.spec.plan import Located, Place, PlaceKey, Plan


@dataclass(frozen=True, slots=True)
class Lot(Located):
    """All GPUs of one kind in machines of one type in one zone; they are interchangeable."""

    gpu: str
    machine: str
    zone: str
    gpus: int
    gpus_per_machine: int
    machines: Machines
    price_usd_per_gpu_hour: float | None
    spot_gpus: int = 0

    def room(self, tp: int) -> int:
        """Groups of ``tp`` GPUs that fit if the lot holds no others."""
        return sum(times * (size // tp) for size, times in self.machines)

    def holds(self, groups: Mapping[int, int]) -> bool:
        """Whether groups, counted by size, fit together, each within one machine."""
        sizes = sorted(size for size, count in groups.items() if count)
        if any(larger % smaller for smaller, larger in pairwise(sizes)):
            return self._packs({size: groups[size] for size in sizes})
        # Where each size divides the next, GPUs left over by larger groups can hold smaller ones.
        return all(
            sum(groups[size] * (size // tp) for size in sizes if size >= tp) <= self.room(tp)
            for tp in sizes
        )

    def _packs(self, groups: Mapping[int, int]) -> bool:
        """``holds`` for any sizes: largest group first, where it leaves the fewest GPUs over."""
        free = Counter(dict(self.machines))
        for tp in sorted(groups, reverse=True):
            left = groups[tp]
            while left:
                fitting = [size for size, times in free.items() if size >= tp and times]
                if not fitting:
                    return False
                best = min(fitting, key=lambda size: (size % tp, size))
                each = best // tp
                # Fill whole machines first, then one machine with the remainder.
                whole = min(free[best], left // each)
                free[best] -= whole or 1
                taken = each if whole else left
                free[best - taken * tp] += whole or 1
                left -= taken * (whole or 1)
        return True


def lots_of(cluster: Cluster, facts: PlaceFacts) -> tuple[Lot, ...]:
    """The lots of the GPUs that are up, sorted by name so that pool order is irrelevant."""
    lots = []
    for key, pools in sorted(pools_by_place(cluster).items()):
        sizes: Counter[int] = Counter()
        for pool in pools:
            sizes.update(dict(pool.machines(pool.gpus)))
        machines = tuple(sorted(sizes.items()))
        count = sum(size * times for size, times in machines)
        if count:
            price = facts.price_usd_per_gpu_hour(Place(*key))
            spot = sum(pool.gpus for pool in pools if pool.spot)
            lots.append(Lot(*key, count, machines[-1][0], machines, price, spot))
    return tuple(lots)


@dataclass(frozen=True, slots=True)
class LotQuota:
    """A quota: the most GPUs that a plan may take from some lots together."""

    where: str
    gpu: str
    lots: frozenset[int]
    gpus_max: int


def grants_of(cluster: Cluster, lots: Sequence[Lot]) -> tuple[LotQuota, ...]:
    """The quotas that are smaller than the GPUs that are up."""
    found = []
    for quota in cluster.quotas:
        bound = frozenset(
            index
            for index, lot in enumerate(lots)
            if lot.gpu == quota.gpu and quota.where in (lot.zone, cluster.region_of(lot.zone))
        )
        if sum(lots[index].gpus for index in bound) > quota.gpus_max:
            found.append(LotQuota(quota.where, quota.gpu, bound, quota.gpus_max))
    return tuple(found)


def gpus_by_lot(plan: Plan, lots: Sequence[Lot]) -> dict[int, int]:
    """Number of GPUs that a plan takes from each lot, by the lot's index."""
    index = {lot.key: k for k, lot in enumerate(lots)}
    return {
        index[key]: sum(tp * count for tp, count in groups.items())
        for key, groups in groups_by_place(plan).items()
    }


def is_supplied(plan: Plan, lots: Iterable[Lot], grants: Iterable[LotQuota] = ()) -> bool:
    """Whether the plan fits into the lots and keeps the quotas."""
    return are_supplied(groups_by_place(plan), tuple(lots), tuple(grants))


def are_supplied(
    wanted: Mapping[PlaceKey, Mapping[int, int]], lots: Sequence[Lot], grants: Sequence[LotQuota]
) -> bool:
    """Whether groups, given by lot and TP degree, fit into the lots and keep the quotas."""
    by_key = {lot.key: index for index, lot in enumerate(lots)}
    used: dict[int, int] = {}
    for key, groups in wanted.items():
        index = by_key.get(key)
        if index is None or not lots[index].holds(groups):
            return False
        used[index] = sum(tp * count for tp, count in groups.items())
    return all(
        sum(used.get(index, 0) for index in grant.lots) <= grant.gpus_max for grant in grants
    )


def lots_hold(lots: Sequence[Lot], wanted: Mapping[int, Mapping[int, int]]) -> bool:
    """Whether groups, given by lot index and TP degree, fit into the machines of their lots."""
    return all(lots[lot].holds(groups) for lot, groups in wanted.items())


def spot_share(used: Mapping[int, int], lots: Sequence[Lot]) -> float:
    """The share of spot GPUs in ``used``, by lot; a lot's on-demand GPUs are taken first."""
    spot = sum(max(0, n - (lots[k].gpus - lots[k].spot_gpus)) for k, n in used.items())
    return spot / sum(used.values())


def missing_price(lots: Iterable[Lot]) -> Problem | None:
    """The problem of a goal or limit in dollars where a price is unknown."""
    unpriced = sorted({f"{x.gpu}@{x.zone}" for x in lots if x.price_usd_per_gpu_hour is None})
    if not unpriced:
        return None
    return Problem(
        "objective",
        f"needs prices, and no price is known for {', '.join(unpriced)}",
        "set price_usd_per_gpu_hour of the pool in the cluster file, or the goal throughput",
    )
