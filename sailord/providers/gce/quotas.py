"""Quotas: which limits the pools draw on, by region and for the whole project."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sailord.providers.gce.config import QUOTA_METRICS, region_of
from sailord.providers.interface import Pool, Quota

PREEMPTIBLE = "PREEMPTIBLE_"
EVERY_GPU = "GPUS_ALL_REGIONS"

Limits = Mapping[str, tuple[float, float]]
"""By metric, the limit and how much of it is used."""


def limits_of(quotas: Iterable[Any]) -> Limits:
    """Read the quotas of a region or of a project."""
    return {one.metric: (one.limit, one.usage) for one in quotas}


def quotas_of(
    pools: Sequence[Pool], by_region: Mapping[str, Limits], project: Limits
) -> tuple[Quota, ...]:
    """Say which limits the pools draw on. What Google does not list limits nothing here.

    A Spot machine draws on the preemptible quota of its region. A region in which nobody asked
    for one has it at 0, and Spot machines then draw on the usual quota, as Google does it.
    """
    drawn: dict[tuple[str, str], list[Pool]] = {}
    for pool in pools:
        metric = metric_of(pool, by_region.get(region_of(pool.zone), {}))
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


def metric_of(pool: Pool, limits: Limits) -> str | None:
    """Name the metric that a pool draws on; ``None``: no quota counts this GPU."""
    usual = QUOTA_METRICS.get(pool.gpu)
    if usual is None:
        return None
    own = f"{PREEMPTIBLE}{usual}"
    return own if pool.spot and limits.get(own, (0.0, 0.0))[0] > 0 else usual
