"""The split of a plan's GPUs into Spot and on-demand machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sailord.planning.messages import PoolSupply
from sailord.planning.spot_mix import split_by_pool

SPOT_A = PoolSupply("a", "m", "gpu", 2, True, 0, 4, 1.0)
FIRM_A = replace(SPOT_A, spot=False, usd_per_hour=3.0)
SPOT_B, FIRM_B = replace(SPOT_A, zone="b"), replace(FIRM_A, zone="b", usd_per_hour=2.0)
POOLS = (SPOT_A, FIRM_A, SPOT_B, FIRM_B)
HERE, THERE = ("gpu", "m", "a"), ("gpu", "m", "b")


@pytest.mark.parametrize(
    ("on_demand_min", "up", "gpus", "counts"),
    [
        (0, (0, 0, 0, 0), {HERE: 6}, (0, 3, 0, 0)),
        (0, (2, 0, 0, 0), {HERE: 6}, (2, 1, 0, 0)),
        (1, (0, 0, 0, 0), {HERE: 6}, (2, 1, 0, 0)),
        (1, (3, 0, 0, 0), {HERE: 6}, (2, 1, 0, 0)),
        (2, (0, 0, 0, 1), {HERE: 4, THERE: 2}, (1, 1, 0, 1)),
        (9, (0, 0, 0, 0), {HERE: 4}, (0, 2, 0, 0)),
        (4, (4, 0, 0, 0), {HERE: 6}, (0, 3, 0, 0)),
        (1, (0, 2, 0, 0), {HERE: 6}, (1, 2, 0, 0)),
        (1, (0, 0, 0, 0), {HERE: 12}, (4, 2, 0, 0)),
    ],
)
def test_a_plan_is_split_between_contracts(on_demand_min, up, gpus, counts):
    pools = [replace(pool, up=count) for pool, count in zip(POOLS, up, strict=True)]
    assert split_by_pool(gpus, pools, on_demand_min) == counts


def test_what_waits_in_a_queue_comes_last_and_what_came_from_it_is_kept():
    flex = replace(FIRM_A, flex=True)
    assert split_by_pool({HERE: 10}, [flex, SPOT_A], 0) == (1, 4)
    assert split_by_pool({HERE: 6}, [replace(flex, up=1), SPOT_A], 0) == (1, 2)
