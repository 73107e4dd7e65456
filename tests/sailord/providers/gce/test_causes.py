"""Why a request for several instances made none."""

from __future__ import annotations

import asyncio

import pytest

from sailord.providers.interface import Refused
from tests.fakes.gce.cloud import Cloud, InjectedFailure
from tests.gce.cloud import HERE, ask, provider


@pytest.mark.parametrize(
    ("behave", "kind", "words"),
    [
        ({"stock": {(HERE, "a2-highgpu-1g", True): 0}}, "stockout", "enough resources"),
        ({"quotas": {("us-central1", "NVIDIA_A100_GPUS"): 0}}, "quota", "NVIDIA_A100_GPUS"),
        # It is not the cause, but no failure of the request either.
        (
            {
                "stock": {(HERE, "a2-highgpu-1g", True): 0},
                "failures": [InjectedFailure(r"GET .*/operations$", 9, 500, "backendError", "x")],
            },
            "unknown",
            "minimum count",
        ),
    ],
)
def test_a_failed_bulk_insert_reports_the_cause_of_a_single_instance(behave, kind, words):
    """A bulk insert may say no more than that it made too few."""
    with provider(Cloud(hides_causes=True, **behave)) as gce:
        outcome = asyncio.run(gce.create(ask(2)))
    assert isinstance(outcome, Refused)
    assert (outcome.kind, words in outcome.text) == (kind, True), outcome.text
