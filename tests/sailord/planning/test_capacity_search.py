"""The target that the planner sets within the budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sailord.planning.capacity_search import choose_capacity
from sailord.planning.messages import CapacityRequest, PoolSupply
from tests.control.cluster import JOB

CLUSTER = Path(__file__).resolve().parents[3] / "examples" / "three-zones.toml"
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


def test_the_target_keeps_the_on_demand_minimum():
    firm = replace(POOL, spot=False, up=0, obtainable=1, usd_per_hour=5.0)
    three = replace(QUESTION, pools=(POOL, firm), usd_per_hour_max=9.5)
    assert choose_capacity(three).counts == (2, 1)
    assert choose_capacity(replace(three, on_demand_min=1)).counts == (2, 1)
