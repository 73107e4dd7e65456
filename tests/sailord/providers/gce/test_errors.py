"""Google's errors are classified by their codes."""

from __future__ import annotations

import pytest
from google.cloud.compute_v1 import Project

from sailord.providers.gce.client import raise_gce_error
from sailord.providers.gce.errors import GceError, gce_error


@pytest.mark.parametrize(
    ("status", "errors", "kind"),
    [
        (503, [("ZONE_RESOURCE_POOL_EXHAUSTED", "x")], "stockout"),
        (503, [("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_ANYTHING_NEW", "x")], "stockout"),
        (0, [("VM_MIN_COUNT_NOT_REACHED", "x"), ("QUOTA_EXCEEDED", "y")], "quota"),
        (0, [("VM_MIN_COUNT_NOT_REACHED", "x"), ("ODD", "y")], "unknown"),
        (0, [("VM_MIN_COUNT_NOT_REACHED", "x")], "unknown"),
        (403, [("quotaExceeded", "Quota 'Queries per minute' exceeded: per minute")], "rate"),
        (403, [("quotaExceeded", "Quota 'CPUS' exceeded.")], "quota"),
        (403, [("forbidden", "Required 'compute.disks.create' permission")], "permission"),
        (403, [("accessNotConfigured", "enable the API")], "permission"),
        (429, [], "rate"),
        (404, [], "bad_request"),
        (404, [("notFound", "x")], "bad_request"),
        (400, [("required", "x")], "bad_request"),
        (401, [("required", "x")], "permission"),
        (403, [], "permission"),
        (503, [("backendError", "x")], "unknown"),
        *(
            (status, [("resourceNotReady", "x")], kind)
            for status, kind in (
                *((400, "unknown"), (403, "unknown"), (404, "unknown"), (409, "unknown")),
                *((412, "unknown"), (418, "unknown"), (0, "unknown")),
                *((401, "permission"), (429, "rate")),
            )
        ),
    ],
)
def test_error_codes_take_precedence_over_http_statuses(status, errors, kind):
    found = gce_error(status, errors)
    assert found.kind == kind
    assert found.code in found.text, "it is told as it came"


def test_only_errors_without_a_meaning_are_transient():
    assert gce_error(503, [("backendError", "x")]).is_transient
    assert not gce_error(503, [("ZONE_RESOURCE_POOL_EXHAUSTED", "x")]).is_transient
    assert not gce_error(418, [("ODD", "x")]).is_transient


def test_an_answer_that_is_not_googles_leaves_the_outcome_unknown():
    with pytest.raises(GceError, match="cannot be read") as found:
        raise_gce_error(lambda: Project.from_json("<html>maintenance</html>"))
    assert found.value.is_transient
