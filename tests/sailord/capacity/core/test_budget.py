"""Limits that the budgets set."""

from __future__ import annotations

import pytest

from sailord.capacity.core.budget import usd_left, usd_per_hour_limit
from sailord.capacity.core.model import CapacityPolicy, CapacityState
from sailord.capacity.core.rented_instance import RentedInstance
from sailord.providers.interface import Instance, Pool


def state(policy: CapacityPolicy, *, hours: float) -> CapacityState:
    pool = Pool("a", "m", "gpu", 1, True)
    rented = RentedInstance(Instance("1", "n", pool, "running", 0.0, "r"), 3.6, 0.0, 0.0)
    return CapacityState(policy, hours * 3600.0, "t1", instances={"1": rented})


def test_the_rest_of_a_total_budget_limits_the_hourly_cost():
    # $3.60 have to last for the 180 s of parting and two looks of 10 s.
    later = state(CapacityPolicy(usd_max=7.2), hours=1.0)
    assert usd_left(later) == pytest.approx(3.6)
    assert usd_per_hour_limit(later) == pytest.approx(3.6 * 3600 / 200)
    assert usd_left(state(CapacityPolicy(usd_max=1.0), hours=1.0)) == 0.0
    assert (
        usd_per_hour_limit(state(CapacityPolicy(usd_max=7.2, usd_per_hour_max=9.0), hours=1.0))
        == 9.0
    )
    assert usd_per_hour_limit(state(CapacityPolicy(), hours=1.0)) is None
