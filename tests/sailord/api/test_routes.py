"""Statuses that a chance request does not meet, and that the OpenAPI document has to list."""

from __future__ import annotations

import pytest

from sailord.api.openapi import refusals_of
from sailord.api.routes import ROUTES


@pytest.mark.parametrize(
    ("name", "status"),
    [
        pytest.param("submit", 502, id="the bucket with the packages of scripts does not answer"),
        pytest.param("report", 403, id="the certificate is another node's"),
        pytest.param("read_part", 403, id="the certificate is no agent's"),
        pytest.param("revoked", 404, id="this sailord signs no certificates"),
        pytest.param("revoked", 422, id="its authority cannot be read"),
        pytest.param("enrol", 404, id="this sailord signs no certificates, and is asked for one"),
    ],
)
def test_a_rare_refusal_is_documented(name: str, status: int) -> None:
    (route,) = (each for each in ROUTES if each.name == name)
    assert status in refusals_of(route)
