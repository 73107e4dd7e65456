"""The target that the planner sets within the budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sailord.capacity.core.budget import usd_left, usd_per_hour_limit
from sailord.capacity.core.model import CapacityState, Policy, RentedInstance
from sailord.planning.capacity_search import choose_capacity
from sailord.planning.messages import CapacityRequest, PoolSupply
from sailord.planning.mix import Mix
from sailord.providers.interface import Instance, Pool
from tests.control.cluster import JOB

CLUSTER = Path(__file__).resolve().parents[2] / "examples" / "three-zones.toml"
POOL = PoolSupply("us-central1-b", "A100-40x2", "A100-40", 2, True, 1, 2, 2.0)
QUESTION = CapacityRequest(JOB, CLUSTER, None, (POOL,), None, 60.0)


@pytest.mark.slow
def test_the_hourly_budget_limits_the_target():
    assert choose_capacity(QUESTION).counts == (3,)
    assert choose_capacity(replace(QUESTION, usd_per_hour_max=4.5)).counts == (2,)


@pytest.mark.slow
def test_the_last_dollars_buy_no_instance():
    wanted = choose_capacity(replace(QUESTION, usd_left=0.1))
    assert wanted.counts == (1,)
    assert "stay" in wanted.why


def test_the_target_keeps_the_mix():
    firm = replace(POOL, spot=False, up=0, obtainable=1, usd_per_hour=5.0)
    three = replace(QUESTION, pools=(POOL, firm), usd_per_hour_max=9.5)
    assert choose_capacity(three).counts == (2, 1)
    assert choose_capacity(replace(three, mix=Mix(on_demand_after_s=60.0))).counts == (3, 0)


# ---- what is left -------------------------------------------------------------------------------


def state(policy: Policy, *, hours: float) -> CapacityState:
    pool = Pool("a", "m", "gpu", 1, True)
    machine = RentedInstance(Instance("1", "n", pool, "running", 0.0, "r"), 3.6, 0.0, 0.0)
    return CapacityState(policy, hours * 3600.0, "t1", machines={"1": machine})


def test_the_rest_of_a_total_budget_limits_the_hourly_cost():
    # $3.60 have to last for the 180 s of parting and two looks of 10 s.
    later = state(Policy(usd_max=7.2), hours=1.0)
    assert usd_left(later) == pytest.approx(3.6)
    assert usd_per_hour_limit(later) == pytest.approx(3.6 * 3600 / 200)
    assert usd_left(state(Policy(usd_max=1.0), hours=1.0)) == 0.0
    assert usd_per_hour_limit(state(Policy(usd_max=7.2, usd_per_hour_max=9.0), hours=1.0)) == 9.0
    assert usd_per_hour_limit(state(Policy(), hours=1.0)) is None
