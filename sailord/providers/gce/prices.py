"""Prices of instances: the user's file, else Google's billing catalogue, else the built-in one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sailord.providers.gce.config import region_of
from sailord.providers.interface import Pool
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import Catalogue, load_catalogue
from simulator.hardware.types import MachineType

SERVICE = "6F81-5844-456A"
"""Id of Compute Engine in the Cloud Billing catalogue."""
GPU_NAMES: Mapping[str, str] = {
    "V100-16": "nvidia tesla v100 gpu",
    "T4": "nvidia tesla t4 gpu",
    "L4": "nvidia l4 gpu",
    "A100-40": "nvidia tesla a100 gpu",
    "A100-80": "nvidia tesla a100 80gb gpu",
    "H100-80": "nvidia h100 80gb gpu",
    "H200-141": "nvidia h200 141gb gpu",
}
_IS_SPOT = {"OnDemand": False, "Preemptible": True}
"""By a price's usage type; others are not for rent by the hour."""
_HOST = re.compile(r"(?:spot preemptible )?(\w+) (?:predefined )?instance (core|ram)\b")

Rates = Mapping[tuple[str, str, bool], float]
"""Dollars an hour per unit, by unit, region and whether it is Spot. Units are GPUs by their
catalogue name, cores (``a2 core``) and GiB of memory (``a2 ram``)."""


def rates_of(skus: Iterable[Mapping[str, Any]]) -> Rates:
    """Read the rates of GPUs, cores and memory from the Cloud Billing catalogue."""
    rates: dict[tuple[str, str, bool], float] = {}
    for sku in skus:
        category = sku.get("category", {})
        spot = _IS_SPOT.get(category.get("usageType"))
        unit = _unit_of(str(sku.get("description", "")).lower(), category.get("resourceGroup", ""))
        usd = _usd_per_hour(sku)
        if unit is None or usd is None or spot is None:
            continue
        for region in sku.get("serviceRegions", ()):
            # A unit may be listed twice for different uses: take the higher price.
            key = (unit, region, spot)
            rates[key] = max(usd, rates.get(key, 0.0))
    return rates


def _unit_of(text: str, group: str) -> str | None:
    if any(word in text for word in ("sole tenancy", "custom", "commitment", "reserved", "dws")):
        return None
    if group == "GPU":
        for name, words in GPU_NAMES.items():
            if text.startswith(words):
                return name
        return None
    found = _HOST.match(text)
    return None if found is None else f"{found[1]} {found[2]}"


def _usd_per_hour(sku: Mapping[str, Any]) -> float | None:
    try:
        expression = sku["pricingInfo"][-1]["pricingExpression"]
        price = expression["tieredRates"][-1]["unitPrice"]
        if expression["usageUnit"] not in ("h", "GiBy.h") or price["currencyCode"] != "USD":
            return None
        return float(int(price.get("units") or 0) + int(price.get("nanos") or 0) / 1e9)
    except (KeyError, IndexError, ValueError):
        return None


def prices_of(
    pools: Sequence[Pool],
    catalogue: Catalogue,
    rates: Rates | None = None,
    own: Mapping[Pool, float] | None = None,
) -> Mapping[Pool, float]:
    """Return dollars an hour per instance of each pool; unpriced pools are absent.

    ``own`` are those that the user says of a group. Google's discount for instances that waited in
    its queue is not read: without a price of the user's own they count as on demand.
    """
    prices = dict(own or {})
    for pool in pools:
        if pool in prices:
            continue
        usd = _of_catalogue(pool, catalogue)
        if rates and not _is_own(pool, usd):
            billed = _of_parts(pool, catalogue.machine(pool.machine), rates)
            usd = usd if billed is None else billed
        if usd is not None:
            prices[pool] = usd
    return prices


def _of_catalogue(pool: Pool, catalogue: Catalogue) -> float | None:
    price = catalogue.machine(pool.machine).price(region_of(pool.zone))
    return None if price is None else price.usd_per_hour(spot=pool.spot)


def _is_own(pool: Pool, usd: float | None) -> bool:
    """Return whether the price is the user's own: not the one of the built-in catalogue."""
    if usd is None:
        return False
    try:
        return _of_catalogue(pool, load_catalogue()) != usd
    except InputError:
        return True


def _of_parts(pool: Pool, machine: MachineType, rates: Rates) -> float | None:
    """Return the sum of a machine's parts; ``None`` if a part has no price."""
    if machine.vcpus is None or machine.host_memory_bytes is None:
        return None
    series, region = machine.name.partition("-")[0], region_of(pool.zone)
    parts = (
        (pool.gpu, machine.gpus),
        (f"{series} core", machine.vcpus),
        (f"{series} ram", machine.host_memory_bytes / 2**30),
    )
    try:
        return sum(rates[unit, region, pool.spot] * amount for unit, amount in parts)
    except KeyError:
        return None
