"""Reads the quotas of GPU families, which regions do not list, from the Cloud Quotas API.

H100 and newer have no other quota on demand. Limits change seldom, so an answer is kept for an
hour. Where they cannot be read they are unknown, not unlimited: what exceeds them is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from sailord.providers.gce.client import GceClient
from sailord.providers.gce.config import GceConfig
from sailord.providers.gce.cures import cure_of
from sailord.providers.gce.errors import GceError

log = structlog.get_logger("sailord")

QUOTA_ID = "GPUS-PER-GPU-FAMILY-per-project-region"
SERVICE = "cloudquotas"
KEPT_S = 3600.0
RETRY_S = 300.0
"""Pause after a failure: quotas are asked for whenever instances come or go."""
NO_LIMIT = -1


@dataclass(frozen=True, slots=True)
class FamilyLimits:
    """GPUs that may be used on demand, as far as Google said."""

    by_family: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By region and family; infinite: no limit."""
    trouble: str = ""
    """Why they could not be read."""
    cure: str = ""
    """What helps, if they could not be read."""

    def limit(self, region: str, family: str | None) -> float | None:
        """Return the limit of a family in a region; ``None``: unknown."""
        return None if family is None else self.by_family.get((region, family))

    def why_unknown(self, what: str, gpu: str) -> tuple[str, str]:
        """Return a sentence about an unknown quota with its cause, and what helps."""
        if self.trouble:
            return f"{what}: {self.trouble}", self.cure or "it is read again later"
        cure = f"Google lists none of {gpu} there: look under IAM & Admin > Quotas"
        return what, f"{cure}; what exceeds it is refused"


class FamilyQuotas:
    """The limits that were last read."""

    def __init__(self, api: GceClient, config: GceConfig, now: Callable[[], float]) -> None:
        self._api = api
        self._config = config
        self._now = now
        self._limits = FamilyLimits()
        self._due_at = float("-inf")

    async def limits(self) -> FamilyLimits:
        """Return the limits, read an hour ago at most; after a failure the last ones."""
        if self._now() < self._due_at:
            return self._limits
        before = self._limits
        parent = f"projects/{self._config.project}/locations/global/services/compute.googleapis.com"
        url = f"{self._config.quotas_endpoint}/v1/{parent}/quotaInfos/{QUOTA_ID}"
        try:
            self._limits = FamilyLimits(read_families(await self._api.get_json(url, {})))
        except GceError as failure:
            cure = cure_of(failure, self._config, SERVICE)
            self._limits = FamilyLimits(before.by_family, failure.text, cure)
            if failure.text != before.trouble:
                log.warning("cannot read quotas of GPU families", error=failure.text, cure=cure)
        self._due_at = self._now() + (RETRY_S if self._limits.trouble else KEPT_S)
        return self._limits


def read_families(info: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Read the limits by region and family.

    An entry that names its region comes before one for several regions.
    """
    limits: dict[tuple[str, str], float] = {}
    entries = info.get("dimensionsInfos", ())
    for entry in sorted(entries, key=lambda one: "region" in one.get("dimensions", {})):
        named = entry.get("dimensions", {})
        family, value = named.get("gpu_family"), _value_of(entry)
        if not family or value is None:
            continue
        regions = [named["region"]] if "region" in named else entry.get("applicableLocations", ())
        limits |= {(region, family): value for region in regions}
    return limits


def _value_of(entry: Mapping[str, Any]) -> float | None:
    """Read a limit, which is a number in a text."""
    try:
        value = int(entry["details"]["value"])
    except (KeyError, TypeError, ValueError):
        return None
    return float("inf") if value == NO_LIMIT else float(value)
