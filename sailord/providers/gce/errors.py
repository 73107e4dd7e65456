"""What an error of Google's API means: one kind of refusal, a sentence, and when to ask again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sailord.providers.interface import RefusalKind

STOCKOUT_PREFIXES = ("ZONE_RESOURCE_POOL_EXHAUSTED", "REGION_RESOURCE_POOL_EXHAUSTED")
STOCKOUT_CODES = frozenset({"insufficientCapacity", "RESOURCE_POOL_EXHAUSTED", "stockout"})
QUOTA_CODES = frozenset({"QUOTA_EXCEEDED", "quotaExceeded", "LIMIT_EXCEEDED", "limitExceeded"})
RATE_CODES = frozenset(
    {
        *("rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED"),
        *("RESOURCE_OPERATION_RATE_EXCEEDED", "resourceOperationRateExceeded"),
        *("CONCURRENT_OPERATIONS_QUOTA_EXCEEDED", "concurrentOperationsQuotaExceeded"),
    }
)
PERMISSION_CODES = frozenset(
    {
        *("forbidden", "authError", "accessNotConfigured", "insufficientPermissions"),
        *("SERVICE_DISABLED", "BILLING_DISABLED", "CONSUMER_INVALID", "USER_PROJECT_DENIED"),
        *("PERMISSION_DENIED", "PERMISSIONS_ERROR", "SERVICE_ACCOUNT_ACCESS_DENIED"),
        *("UNAUTHENTICATED", "ACCESS_TOKEN_SCOPE_INSUFFICIENT", "expired"),
        "IAM_PERMISSION_DENIED",
    }
)
BAD_REQUEST_CODES = frozenset(
    {
        *("invalid", "badRequest", "notFound", "parseError", "INVALID_USAGE", "INVALID_FIELD"),
        *("RESOURCE_NOT_FOUND", "invalidParameter", "UNSUPPORTED_OPERATION", "required"),
        *("alreadyExists", "RESOURCE_ALREADY_EXISTS", "conditionNotMet"),
    }
)
TRANSIENT_STATUSES = frozenset({408, 500, 502, 503, 504})
NO_CAUSE = frozenset({"VM_MIN_COUNT_NOT_REACHED"})
"""Codes that say that too few were made, and nothing of why; another beside them does."""


@dataclass(eq=False)
class Failure(Exception):  # noqa: N818 - what an answer said, for whoever asked
    """A call or an operation failed, and this is what its error says."""

    kind: RefusalKind
    text: str
    status: int = 0
    """Of HTTP, where an answer came; 0: none did."""
    retry_after_s: float | None = None
    code: str = ""

    @property
    def is_transient(self) -> bool:
        """It says nothing about what was asked for: that may have been done or not."""
        return self.kind == "unknown" and (self.status == 0 or self.status in TRANSIENT_STATUSES)

    def __str__(self) -> str:
        return self.text


def failure_of(
    status: int,
    errors: Sequence[tuple[str, str]],
    *,
    message: str = "",
    retry_after_s: float | None = None,
) -> Failure:
    """Say what an answer means, by its HTTP status and its pairs of code and message.

    The codes speak first, as a stock-out comes with status 503 and a quota with 403. A code that
    nobody knows is ``unknown``; it is told as it came, and stands for a lack of capacity, whatever
    the status: a 400 may be a resource that is not ready yet. Only 401 and 429 mean one thing.
    """
    known = [(kind_of_code(code, text), code, text) for code, text in errors]
    telling = [one for one in known if one[0] is not None] or [
        (None, code, text) for code, text in errors if code not in NO_CAUSE
    ]
    kind, code, text = (telling or known or [(None, "", message)])[0]
    if status == 401 or (kind is None and (status == 429 or not code)):
        kind = _kind_of_status(status)
    sentence = text or message or f"HTTP status {status}"
    told = f"{code}: {sentence}" if code and code not in sentence else sentence
    return Failure(kind or "unknown", told, status, retry_after_s, code)


def kind_of_code(code: str, text: str) -> RefusalKind | None:
    """Give the kind of a code, or ``None`` for one that is not known."""
    if code.startswith(STOCKOUT_PREFIXES) or code in STOCKOUT_CODES:
        return "stockout"
    if code in RATE_CODES:
        return "rate"
    if code in QUOTA_CODES:
        # Requests per minute are a quota in name alone: they come back by themselves.
        return "rate" if re.search(r"per (minute|second|100 seconds)", text) else "quota"
    if code in PERMISSION_CODES:
        return "permission"
    if code in BAD_REQUEST_CODES:
        return "bad_request"
    return None


def _kind_of_status(status: int) -> RefusalKind:
    match status:
        case 401 | 403:
            return "permission"
        case 429:
            return "rate"
        case 400 | 404 | 409 | 412:
            return "bad_request"
        case _:
            return "unknown"
