"""The target that the planner sets within the budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sailord.planning.capacity_search import choose_capacity, least_usd, shortest_s
from sailord.planning.messages import CapacityRequest, EndRequest, PoolSupply, WorkLeft
from tests.control.cluster import JOB
from tests.sailord.planning.requests import CHUNKED

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


@pytest.mark.slow
def test_the_target_keeps_the_on_demand_minimum():
    firm = replace(POOL, spot=False, up=0, obtainable=1, usd_per_hour=5.0)
    three = replace(QUESTION, pools=(POOL, firm), usd_per_hour_max=9.5)
    assert choose_capacity(three).counts == (2, 1)
    assert choose_capacity(replace(three, on_demand_min=1)).counts == (2, 1)


@pytest.mark.slow
def test_a_job_whose_goal_is_cost_rents_on_demand_only_where_spot_does_not_do():
    cheap = replace(QUESTION, spec=JOB + '\n[objective]\ngoal = "cost"\n')
    spot = replace(POOL, up=0, obtainable=3)
    firm = replace(spot, spot=False, usd_per_hour=6.0)

    def counts(*pools, **about):
        return choose_capacity(replace(cheap, pools=pools, **about)).counts

    on_demand, on_spot = counts(firm, spot)
    assert (on_demand, on_spot > 0) == (0, True)
    rented = replace(firm, up=1)
    assert counts(rented, spot) == (0, on_spot), "once spot instances can be had again"
    assert counts(replace(rented, unrented=1), spot)[0] == 1, "a node of one's own is used"
    assert counts(firm, spot, on_demand_min=1)[0] == 1
    assert counts(rented, replace(spot, obtainable=0)) == (1, 0)


DUE = replace(
    QUESTION,
    left=WorkLeft(100, 1e6, 0.5),
    pools=(POOL, replace(POOL, spot=False, up=0, obtainable=2, usd_per_hour=5.0)),
)


@pytest.mark.slow
def test_a_deadline_gets_each_contract_apart():
    found = choose_capacity(DUE)
    assert found.counts == (3, 0), "without what is rented for the deadline"
    choices = found.choices
    assert choices.spot == (3, 0)
    assert choices.on_demand.counts == (0, 2)
    assert choices.on_demand == choices.fastest
    assert choices.spot_now is None, "no agent is there yet"
    ready = (replace(POOL, ready=1), DUE.pools[1])
    now = choose_capacity(replace(DUE, pools=ready)).choices.spot_now
    assert now.counts == (1, 0)
    assert now.step_s > choices.on_demand.step_s
    assert choose_capacity(replace(DUE, pools=DUE.pools[:1])).choices is None


@pytest.mark.slow
def test_spot_machines_that_are_lacking_are_not_called_dear():
    """The job has an on-demand node of its own, on which a step costs what it costs on demand."""
    cheap = replace(DUE, spec=JOB + '\n[objective]\ngoal = "cost"\n')
    none, own = replace(POOL, up=0, obtainable=0), replace(DUE.pools[1], up=1, unrented=1)
    found = choose_capacity(replace(cheap, pools=(none, own)))
    assert (found.counts, found.choices.is_spot_dear) == ((0, 1), False)
    dear = replace(none, obtainable=2, usd_per_hour=6.0)
    found = choose_capacity(replace(cheap, pools=(dear, own)))
    assert (found.counts, found.choices.is_spot_dear) == ((0, 0), True)


@pytest.mark.slow
def test_machines_that_wait_in_a_queue_are_no_safety_net_and_not_needed_where_spot_does():
    flex = replace(DUE.pools[1], flex=True)
    found = choose_capacity(replace(DUE, pools=(POOL, flex)))
    assert found.choices is None
    assert found.counts == (3, 2), "all that there is"
    both = choose_capacity(replace(DUE, pools=(*DUE.pools, replace(flex, zone="us-central1-a"))))
    assert both.choices.on_demand.counts == (0, 2, 0)
    spot, cheap = replace(POOL, up=0, obtainable=3), JOB + '\n[objective]\ngoal = "cost"\n'
    counts = choose_capacity(replace(QUESTION, spec=cheap, pools=(flex, spot))).counts
    assert (counts[0], counts[1] > 0) == (0, True)
    none = replace(spot, obtainable=0)
    assert choose_capacity(replace(QUESTION, spec=cheap, pools=(flex, none))).counts[0] > 0


@pytest.mark.slow
def test_a_job_whose_goal_is_cost_has_a_fastest_choice_besides():
    cheap = JOB + '\n[objective]\ngoal = "cost"\n'
    pools = (POOL, replace(DUE.pools[1], obtainable=4))
    choices = choose_capacity(replace(DUE, spec=cheap, pools=pools)).choices
    assert choices.fastest.step_s <= choices.on_demand.step_s
    assert choices.fastest.usd_per_hour >= choices.on_demand.usd_per_hour


@pytest.mark.slow
def test_a_choice_without_on_demand_machines_gives_the_reason():
    none = replace(DUE.pools[1], obtainable=0)
    choices = choose_capacity(replace(DUE, pools=(POOL, none))).choices
    assert (choices.on_demand, choices.why_not) == (None, "none can be had")


@pytest.mark.slow
def test_how_soon_a_job_could_be_done():
    steps = JOB.replace("[training]", "[training]\nsteps = 100", 1)
    alone = EndRequest(steps, CLUSTER, None, None, (POOL,))
    more = replace(alone, pools=(replace(POOL, obtainable=7),))
    assert 0 < shortest_s(more) < shortest_s(alone)
    assert shortest_s(replace(alone, pools=None)) > 0
    begun = replace(alone, begun=90)
    assert shortest_s(begun) == pytest.approx(shortest_s(alone) / 10)
    assert least_usd(begun) == pytest.approx(least_usd(alone) / 10)
    assert shortest_s(replace(alone, begun=120)) == 0


@pytest.mark.slow
def test_what_a_job_costs_at_least():
    """It is told though it is beyond the budget."""
    steps = JOB.replace("[training]", "[training]\nsteps = 100", 1)
    poor = steps + "\n[objective]\nmax_usd_total = 0.0001\n"
    ask = EndRequest(steps, CLUSTER, None, None, (replace(POOL, obtainable=7),))
    usd = least_usd(ask)
    assert usd > 0.0001
    assert least_usd(replace(ask, spec=poor)) == usd
    assert least_usd(replace(ask, spec=steps.replace("steps = 100", "steps = 50"))) < usd


@pytest.mark.slow
def test_a_budget_in_total_is_for_the_steps_left():
    steps = JOB.replace("[training]", "[training]\nsteps = 100", 1)
    usd = least_usd(EndRequest(steps, CLUSTER, None, None, (POOL,), begun=50))
    poor = steps + f"\n[objective]\nmax_usd_total = {usd * 1.1}\n"
    assert choose_capacity(replace(QUESTION, spec=poor)).counts is None
    assert choose_capacity(replace(QUESTION, spec=poor, begun=50)).counts is not None


@pytest.mark.slow
def test_chunks_of_a_device_are_one_device():
    pool = PoolSupply("zone-a", "emulated-large", "emulated-large", 1, False, 0, 5, 2.0)
    asked = replace(QUESTION, spec=CHUNKED.spec, cluster_file=CHUNKED.cluster_file, pools=(pool,))
    assert choose_capacity(asked).counts == (4,)
