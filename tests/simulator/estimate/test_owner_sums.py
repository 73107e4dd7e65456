"""Sums of gradients for the owners of ZeRO-1, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.hardware.runtime_constants import PLATFORMS, platform_of
from tests.simulator.estimate.test_gradient_sync import (
    EAST,
    EFFICIENCY,
    LATENCY_S,
    RATE,
    WEST,
    across_zones,
    far_apart,
    held_bytes,
    nodes,
    sums,
    whole,
    wires,
    world,
)


@pytest.mark.parametrize("members", [2, 3, 7])
def test_a_sum_for_its_owner_goes_around_the_ring_once(members: int) -> None:
    """All its bytes, where an all-reduce sends 2 (n - 1) / n of them."""
    here = world(zero=1)
    (only,) = sums(here, whole(*nodes(members)))
    assert only.algorithm == "reduce"
    assert only.seconds == pytest.approx(held_bytes(here) / RATE / EFFICIENCY)
    for other in (world(), world(zero=1, runtime="megatron-deepspeed")):
        (only,) = sums(other, whole(*nodes(members)))
        assert only.algorithm == "ring"
        twice = 2 * (members - 1) / members * held_bytes(other) / RATE / EFFICIENCY
        assert only.seconds == pytest.approx(twice)


def test_a_shared_tensor_goes_to_its_owner_too() -> None:
    here = world(zero=1, tied=True)
    _, tied = sums(here, whole(*nodes(3)))
    assert tied.algorithm == "tied"
    size = 4.0 * here.costs.tied_parameters(1)
    assert tied.seconds == pytest.approx(size / RATE / EFFICIENCY)


def test_no_stages_over_zones_and_half_the_egress() -> None:
    """Where an all-reduce would be staged, the ring crosses the slow way with all bytes."""
    slow = wires(across=RATE / 10)
    plan = across_zones(4, EAST, WEST)
    here = world(slow, zero=1)
    (plain,), (only,) = sums(world(slow), plan), sums(here, plan)
    assert (plain.algorithm, only.algorithm) == ("hierarchical", "reduce")
    assert only.seconds == pytest.approx(held_bytes(here) / (RATE / 10) / EFFICIENCY)
    crossing = 7 / 8 * held_bytes(here)
    assert dict(only.egress_bytes) == pytest.approx(
        {(EAST, WEST): crossing, (WEST, EAST): crossing}
    )


def test_the_owner_gathers_what_gloos_ring_has_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step waits for the receiver: n - 1 around the ring, and one in which all send."""
    monkeypatch.setitem(
        PLATFORMS, "V100-16", replace(platform_of("V100-16"), transport="gloo", ring_efficiency=1.0)
    )
    for members in (2, 4):
        here = world(far_apart(), zero=1)
        (found,) = sums(here, whole(*nodes(members - 1), *nodes(1, WEST)))
        sent_s = 2 * (members - 1) / members * held_bytes(here) / RATE
        assert found.seconds == pytest.approx(members * 2 * LATENCY_S + sent_s)
