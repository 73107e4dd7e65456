"""Quotas on GPUs: which pools share them, per region and for the project."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sailord.providers.gce.config import QUOTA_METRICS, region_of
from sailord.providers.interface import Pool, Quota

PREEMPTIBLE = "PREEMPTIBLE_"
EVERY_GPU = "GPUS_ALL_REGIONS"

Limits = Mapping[str, tuple[float, float]]
"""Limit and usage, by metric."""


def read_limits(quotas: Iterable[Any]) -> Limits:
    """Read the quotas of a region or of a project."""
    return {one.metric: (one.limit, one.usage) for one in quotas}


def quotas_of(
    pools: Sequence[Pool], by_region: Mapping[str, Limits], project: Limits
) -> tuple[Quota, ...]:
    """Return the quotas that limit the pools.

    Spot instances use the preemptible quota of their region, or the regular one where the
    preemptible quota is 0, as Google does it.
    """
    drawn: dict[tuple[str, str], list[Pool]] = {}
    for pool in pools:
        metric = quota_metric(pool, by_region.get(region_of(pool.zone), {}))
        if metric is not None:
            drawn.setdefault((region_of(pool.zone), metric), []).append(pool)
    found = [
        Quota(f"{metric} in {region}", tuple(those), *by_region[region][metric])
        for (region, metric), those in sorted(drawn.items())
        if metric in by_region[region]
    ]
    usual = tuple(pool for pool in pools if not pool.spot)
    if EVERY_GPU in project and usual:
        found.append(Quota(f"{EVERY_GPU} of the project", usual, *project[EVERY_GPU]))
    return tuple(found)


def quota_metric(pool: Pool, limits: Limits) -> str | None:
    """Return the metric of a pool's quota; ``None``: no quota for this GPU."""
    usual = QUOTA_METRICS.get(pool.gpu)
    if usual is None:
        return None
    own = f"{PREEMPTIBLE}{usual}"
    return own if pool.spot and limits.get(own, (0.0, 0.0))[0] > 0 else usual
