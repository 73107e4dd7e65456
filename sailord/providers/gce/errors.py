"""Classifies errors of Google's API: a kind of refusal, a message, and when to retry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sailord.providers.interface import RefusalKind

STOCKOUT_PREFIXES = ("ZONE_RESOURCE_POOL_EXHAUSTED", "REGION_RESOURCE_POOL_EXHAUSTED")
_CODES: Mapping[RefusalKind, str] = {
    "stockout": "insufficientCapacity RESOURCE_POOL_EXHAUSTED stockout",
    "quota": "QUOTA_EXCEEDED quotaExceeded LIMIT_EXCEEDED limitExceeded",
    "rate": "rateLimitExceeded userRateLimitExceeded RATE_LIMIT_EXCEEDED "
    "RESOURCE_OPERATION_RATE_EXCEEDED resourceOperationRateExceeded "
    "CONCURRENT_OPERATIONS_QUOTA_EXCEEDED concurrentOperationsQuotaExceeded",
    "permission": "forbidden authError accessNotConfigured insufficientPermissions "
    "SERVICE_DISABLED BILLING_DISABLED CONSUMER_INVALID USER_PROJECT_DENIED PERMISSION_DENIED "
    "PERMISSIONS_ERROR SERVICE_ACCOUNT_ACCESS_DENIED UNAUTHENTICATED "
    "ACCESS_TOKEN_SCOPE_INSUFFICIENT expired IAM_PERMISSION_DENIED",
    "bad_request": "invalid badRequest notFound parseError INVALID_USAGE INVALID_FIELD "
    "RESOURCE_NOT_FOUND invalidParameter UNSUPPORTED_OPERATION required alreadyExists "
    "RESOURCE_ALREADY_EXISTS conditionNotMet",
}
KINDS = {code: kind for kind, codes in _CODES.items() for code in codes.split()}
"""Kinds of refusal by Google's code."""
TRANSIENT_STATUSES = frozenset({408, 500, 502, 503, 504})
NO_CAUSE = frozenset({"VM_MIN_COUNT_NOT_REACHED"})
"""Codes without a cause; another code beside them has it."""


@dataclass(eq=False)
class GceError(Exception):
    """A call or an operation failed."""

    kind: RefusalKind
    text: str
    status: int = 0
    """HTTP status; 0: no answer."""
    retry_after_s: float | None = None
    code: str = ""

    @property
    def is_transient(self) -> bool:
        """Whether the outcome is unknown: the request may have been executed or not."""
        return self.kind == "unknown" and (self.status == 0 or self.status in TRANSIENT_STATUSES)

    def __str__(self) -> str:
        return self.text


def gce_error(
    status: int,
    errors: Sequence[tuple[str, str]],
    *,
    message: str = "",
    retry_after_s: float | None = None,
) -> GceError:
    """Classify an answer by its HTTP status and its pairs of code and message.

    Codes come first, as a stockout has status 503 and a quota 403. An unlisted code is ``unknown``
    whatever the status, as a 400 may be a resource that is not ready yet; except 401 and 429.
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
    return GceError(kind or "unknown", told, status, retry_after_s, code)


def kind_of_code(code: str, text: str) -> RefusalKind | None:
    """Return the kind of a code; ``None`` for an unlisted one."""
    if code.startswith(STOCKOUT_PREFIXES):
        return "stockout"
    kind = KINDS.get(code)
    # Requests per minute are a rate, though called a quota.
    is_rate = kind == "quota" and re.search(r"per (minute|second|100 seconds)", text)
    return "rate" if is_rate else kind


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
