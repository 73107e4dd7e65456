"""The mix of Spot and on-demand instances."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sailord.capacity.core.decide import decide, is_out_of_stock, obtainable
from sailord.capacity.core.model import (
    CapacityRecord,
    CapacityState,
    Observed,
    Policy,
    PricesRead,
    QuotasRead,
    RequestAnswered,
    TargetSet,
    Tick,
    TookOver,
    request_id_of,
)
from sailord.capacity.core.planner_view import pool_supplies
from sailord.core.state import State
from sailord.planning.messages import PoolSupply
from sailord.planning.mix import Mix
from sailord.planning.spot_mix import hold_back_on_demand, split_by_pool
from sailord.providers.interface import Granted, Instance, Observation, Pool, Quota, Refused

SPOT_A = PoolSupply("a", "m", "gpu", 2, True, 0, 4, 1.0)
FIRM_A = replace(SPOT_A, spot=False, usd_per_hour=3.0)
SPOT_B, FIRM_B = replace(SPOT_A, zone="b"), replace(FIRM_A, zone="b", usd_per_hour=2.0)
POOLS = (SPOT_A, FIRM_A, SPOT_B, FIRM_B)
HERE, THERE = ("gpu", "m", "a"), ("gpu", "m", "b")


@pytest.mark.parametrize(
    ("mix", "up", "gpus", "counts"),
    [
        (Mix(), (0, 0, 0, 0), {HERE: 6}, (0, 3, 0, 0)),
        (Mix(), (2, 0, 0, 0), {HERE: 6}, (2, 1, 0, 0)),
        (Mix(1), (0, 0, 0, 0), {HERE: 6}, (2, 1, 0, 0)),
        (Mix(1), (3, 0, 0, 0), {HERE: 6}, (2, 1, 0, 0)),
        (Mix(2), (0, 0, 0, 1), {HERE: 4, THERE: 2}, (1, 1, 0, 1)),
        (Mix(9), (0, 0, 0, 0), {HERE: 4}, (0, 2, 0, 0)),
        (Mix(0, 0.5), (0, 0, 0, 0), {HERE: 4, THERE: 4}, (0, 2, 2, 0)),
        (Mix(0, 0.5), (0, 0, 0, 0), {HERE: 6}, (1, 2, 0, 0)),
        (Mix(0, 1.0), (4, 0, 0, 0), {HERE: 6}, (0, 3, 0, 0)),
        (Mix(0, 0.0, 60.0), (0, 0, 0, 0), {HERE: 6}, (3, 0, 0, 0)),
        (Mix(0, 0.0, 60.0), (0, 2, 0, 0), {HERE: 6}, (1, 2, 0, 0)),
        (Mix(0, 0.0, 60.0), (0, 0, 0, 0), {HERE: 12}, (4, 2, 0, 0)),
        (Mix(0, 0.0, 60.0), (0, 0, 0, 0), {HERE: 5}, (3, 0, 0, 0)),
    ],
)
def test_a_plan_is_split_between_contracts(mix, up, gpus, counts):
    pools = [replace(pool, up=count) for pool, count in zip(POOLS, up, strict=True)]
    assert split_by_pool(gpus, pools, mix) == counts


def room(pools) -> list[int]:
    return [pool.obtainable for pool in pools]


def test_on_demand_waits_for_spot_and_the_cheapest_fills_the_minimum():
    mix = Mix(2, 0.0, 300.0)
    assert (
        room(hold_back_on_demand(POOLS, replace(mix, on_demand_after_s=None), lambda _: False))
        == [4] * 4
    )
    assert room(hold_back_on_demand(POOLS, mix, lambda _: False)) == [4, 0, 4, 2]
    assert room(hold_back_on_demand(POOLS, mix, lambda pool: pool.zone == "a")) == [4, 0, 4, 2]
    assert room(hold_back_on_demand(POOLS, mix, lambda _: True)) == [4, 4, 4, 4]
    there = (SPOT_A, replace(FIRM_A, up=1), SPOT_B, FIRM_B)
    assert room(hold_back_on_demand(there, mix, lambda _: False)) == [4, 0, 4, 1]
    none = [replace(pool, obtainable=0) if pool.spot else pool for pool in POOLS]
    assert room(hold_back_on_demand(none, mix, lambda _: False)) == [0, 0, 0, 2]


def test_the_on_demand_share_grows_with_the_spot_supply():
    # Eight Spot machines could come: with eight on demand half of all would be.
    assert room(hold_back_on_demand(POOLS, Mix(0, 0.5, 300.0), lambda _: False)) == [4, 4, 4, 4]
    assert room(hold_back_on_demand(POOLS, Mix(0, 0.25, 300.0), lambda _: False)) == [4, 0, 4, 3]
    assert room(hold_back_on_demand(POOLS, Mix(0, 1.0, 300.0), lambda _: False)) == [4, 4, 4, 4]


def test_a_gpu_without_spot_is_rented_on_demand():
    other = replace(FIRM_A, gpu="other", machine="o")
    assert room(
        hold_back_on_demand((SPOT_A, FIRM_A, other), Mix(0, 0.0, 9.0), lambda _: False)
    ) == [4, 0, 4]


# ---- how long Spot is out ------------------------------------------------------------------------

SPOT, FIRM = Pool("a", "m", "gpu", 2, True), Pool("a", "m", "gpu", 2, False)
POLICY = Policy(on_demand_after_s=300.0, machines_per_pool_max=4)


class Story:
    def __init__(self) -> None:
        self.state = CapacityState(POLICY)
        self.hear(TookOver(0.0, "t1", CapacityRecord()))
        self.hear(PricesRead(0.0, {SPOT: 1.0, FIRM: 3.0})).hear(QuotasRead(0.0, ()))
        self.hear(Observed(0.0, Observation(0.0, ())))

    def hear(self, event) -> Story:
        self.state, _ = decide(self.state, event)
        return self

    def ask_and_refuse(self, at: float, kind: str = "stockout") -> Story:
        self.hear(TargetSet(at, {SPOT: 1}))
        self.hear(
            RequestAnswered(at, Refused(request_id_of("t1", self.state.requests), kind, "no"))
        )
        return self.hear(TargetSet(at, {}))

    def on_demand(self) -> int:
        asked = pool_supplies(self.state, (SPOT, FIRM), State())
        return next(pool.obtainable for pool in asked if not pool.spot)


def test_on_demand_is_offered_after_spot_was_out_of_stock_long_enough():
    story = Story()
    assert obtainable(story.state, FIRM) == 4
    assert story.on_demand() == 0
    story.ask_and_refuse(10.0).ask_and_refuse(80.0).ask_and_refuse(250.0)
    assert story.hear(Tick(309.0)).on_demand() == 0
    assert story.hear(Tick(310.0)).on_demand() == 4
    # Nobody has asked for Spot for long: it may be back, and goes first again.
    assert story.hear(Tick(2000.0)).on_demand() == 0
    machine = Instance("1", "n", SPOT, "running", 2000.0, request_id_of("t1", 4), "n")
    story.hear(TargetSet(2000.0, {SPOT: 1}))
    story.hear(
        RequestAnswered(2001.0, Granted(request_id_of("t1", story.state.requests), (machine,)))
    )
    story.ask_and_refuse(2002.0)
    assert story.hear(Tick(2011.0)).on_demand() == 0, "what was granted ends the count"


def test_a_rate_limit_is_no_stockout():
    story = Story().ask_and_refuse(10.0, "rate").ask_and_refuse(200.0, "rate")
    assert story.hear(Tick(330.0)).on_demand() == 0


def test_spot_without_quota_is_out_of_stock_at_once():
    story = Story().hear(QuotasRead(1.0, (Quota("PREEMPTIBLE", (SPOT,), 0.0, 0.0),)))
    assert is_out_of_stock(story.state, SPOT, 300.0)
    assert story.on_demand() == 4


def test_old_refusals_do_not_count():
    story = Story().ask_and_refuse(10.0)
    story.ask_and_refuse(10_000.0)
    rest = story.state.cooldowns[SPOT]
    assert (rest.refusals, rest.since) == (1, 10_000.0)
