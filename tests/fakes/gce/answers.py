"""How the fake cloud's REST API writes errors, moments and prices, and reads filters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.fakes.gce.resources import ApiError

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer."""

    status: int
    body: Answer
    headers: Mapping[str, str] = field(default_factory=dict)


def fits(resource: Answer, rule: str) -> bool:
    """Whether a resource passes a filter: terms of ``=`` joined by AND, or by OR in parentheses."""
    if not rule:
        return True
    return all(
        any(_holds(resource, term) for term in part.strip().strip("()").split(" OR "))
        for part in rule.split(" AND ")
    )


def _holds(resource: Answer, term: str) -> bool:
    found = re.fullmatch(r'\s*([\w.-]+)\s*=\s*"?([^"]*?)"?\s*', term)
    if found is None:
        raise ApiError(400, "invalid", f"Invalid value for field 'filter': '{term}'.")
    value: Any = resource
    for key in found[1].split(".", 1):
        value = value.get(key) if isinstance(value, dict) else None
    return str(value) == found[2]


def refusal(error: ApiError, headers: Mapping[str, str] | None = None) -> Reply:
    """An error as the API tells it."""
    entry = {"domain": "global", "reason": error.reason, "message": error.message}
    body = {"code": error.status, "message": error.message, "errors": [entry]}
    return Reply(error.status, {"error": body}, headers or {})


def newer_refusal(error: ApiError) -> Reply:
    """An error as Google's newer APIs tell it: the reason is among details."""
    body: Answer = {"code": error.status, "message": error.message}
    if error.status == 403:
        reason = {"forbidden": "IAM_PERMISSION_DENIED"}.get(error.reason, error.reason)
        kind = "type.googleapis.com/google.rpc.ErrorInfo"
        body["details"] = [{"@type": kind, "reason": reason, "domain": "googleapis.com"}]
    return Reply(error.status, {"error": body})


def written(at: float) -> str:
    """A moment as the API writes it, in milliseconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def sku(description: str, group: str, region: str, usd: float, *, spot: bool = False) -> Answer:
    """One price of the billing catalogue."""
    rate = {"units": str(int(usd)), "nanos": round((usd - int(usd)) * 1e9), "currencyCode": "USD"}
    unit = "GiBy.h" if group == "RAM" else "h"
    return {
        "description": description,
        "category": {
            "resourceFamily": "Compute",
            "resourceGroup": group,
            "usageType": "Preemptible" if spot else "OnDemand",
        },
        "serviceRegions": [region],
        "pricingInfo": [
            {"pricingExpression": {"usageUnit": unit, "tieredRates": [{"unitPrice": rate}]}}
        ],
    }
