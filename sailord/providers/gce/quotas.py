"""Quotas on GPUs: which pools share them, per region and for the project."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sailord.providers.gce.client import GceClient
from sailord.providers.gce.config import QUOTA_METRICS, region_of
from sailord.providers.gce.family_quotas import FamilyLimits
from sailord.providers.interface import Instance, Pool, QuotaUsage

PREEMPTIBLE = "PREEMPTIBLE_"
EVERY_GPU = "GPUS_ALL_REGIONS"
FAMILY = "GPUS_PER_GPU_FAMILY"
OWN_METRIC = frozenset({"V100-16", "T4", "L4", "A100-40", "A100-80"})
"""GPUs with a metric of their own on demand; newer ones have a quota by family."""

QuotaLimits = Mapping[str, tuple[float, float]]
"""Limit and usage, by metric."""


async def limits_by_region(api: GceClient, regions: Iterable[str]) -> dict[str, QuotaLimits]:
    """Read the quotas that some regions list."""
    return {
        region: read_limits((await api.call("Regions", "get", region=region)).quotas)
        for region in sorted(regions)
    }


def read_limits(quotas: Iterable[Any]) -> QuotaLimits:
    """Read the quotas of a region or of a project."""
    return {one.metric: (one.limit, one.usage) for one in quotas}


def quotas_of(
    pools: Sequence[Pool],
    by_region: Mapping[str, QuotaLimits],
    project: QuotaLimits,
    families: FamilyLimits,
    rented: Iterable[Instance],
) -> tuple[QuotaUsage, ...]:
    """Return the quotas that limit the pools.

    Spot instances, and those that waited in Google's queue, use the preemptible quota of their
    region, or the regular one where the preemptible quota is 0, as Google does it. Google does not
    say how much of a family's quota is used: what this cluster has ``rented`` counts.
    """
    drawn: dict[tuple[str, str], list[Pool]] = {}
    unlisted: dict[tuple[str, str], list[Pool]] = {}
    for pool in pools:
        region, family = region_of(pool.zone), family_of(pool.gpu)
        metric = quota_metric(pool, by_region.get(region, {}))
        if metric in by_region.get(region, {}):
            drawn.setdefault((region, metric), []).append(pool)
        elif family is not None:
            unlisted.setdefault((region, family), []).append(pool)
    found = [
        QuotaUsage(f"{metric} in {region}", tuple(those), *by_region[region][metric])
        for (region, metric), those in sorted(drawn.items())
    ]
    there = tuple(rented)
    for (region, family), those in sorted(unlisted.items()):
        limit, kinds = families.limit(region, family), {(one.gpu, one.contract) for one in those}
        used = sum(
            each.pool.gpus
            for each in there
            if region_of(each.pool.zone) == region and (each.pool.gpu, each.pool.contract) in kinds
        )
        name, why = f"{FAMILY} of {family} in {region}", ""
        if limit is None:
            why = families.trouble or "Google lists none there"
        if limit is None or math.isfinite(limit):
            found.append(QuotaUsage(name, tuple(those), limit, used, why))
    usual = tuple(pool for pool in pools if pool.is_on_demand)
    if EVERY_GPU in project and usual:
        found.append(QuotaUsage(f"{EVERY_GPU} of the project", usual, *project[EVERY_GPU]))
    return tuple(found)


def needs_families(pools: Iterable[Pool], by_region: Mapping[str, QuotaLimits]) -> bool:
    """Return whether a pool draws on the quota of a family."""
    return any(
        family_of(pool.gpu) is not None
        and quota_metric(pool, by_region.get(region_of(pool.zone), {}))
        not in by_region.get(region_of(pool.zone), {})
        for pool in pools
    )


def family_of(gpu: str) -> str | None:
    """Return the family by which Google limits a GPU; ``None``: it has a metric of its own."""
    return None if gpu in OWN_METRIC else f"NVIDIA_{gpu.partition('-')[0].upper()}"


def quota_metric(pool: Pool, limits: QuotaLimits) -> str:
    """Return the metric of a pool's quota; a region may not list it."""
    usual = QUOTA_METRICS.get(pool.gpu, "")
    own = f"{PREEMPTIBLE}{usual}"
    return own if not pool.is_on_demand and limits.get(own, (0.0, 0.0))[0] > 0 else usual
