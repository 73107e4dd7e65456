"""Splitting a total in proportion, and checks of outer steps and of groups on named nodes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from simulator.inputs.plan_check import check_plan, split_in_proportion
from tests.simulator.estimate.test_gradient_sync import (
    EAST,
    WEST,
    across_zones,
    nodes,
    whole,
    world,
)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(0, 500))
def test_total_is_split_in_proportion(weights: list[int], spare: int) -> None:
    total = len(weights) + spare
    shares = split_in_proportion(total, weights)
    assert sum(shares) == total
    assert all(share >= 1 for share in shares)
    assert split_in_proportion(sum(weights), weights) == weights


def test_outer_steps_need_pipelines_that_share_no_zone() -> None:
    here = world(global_batch=4)
    apart = across_zones(1, EAST, WEST)
    assert check_plan(replace(apart, outer_every=50), here.job, here.cluster) == ()
    (fault,) = check_plan(replace(across_zones(2, EAST), outer_every=50), here.job, here.cluster)
    assert fault.place == "plan: outer_every"
    assert fault.what == "is 50, but all pipelines share zones, so they are one group"


def test_groups_on_one_node_fit_a_machine_also_where_no_devices_are_named() -> None:
    here = world(global_batch=4, max_tp=4)
    one, other = nodes(2)
    assert check_plan(whole(one, other, tp=4), here.job, here.cluster) == ()
    assert check_plan(whole(one, one, tp=2), here.job, here.cluster) == ()
    (fault,) = check_plan(whole(one, one, tp=4), here.job, here.cluster)
    assert fault.what == f"puts groups of 8 GPUs on {one.node}, and a machine there has 4"


def test_a_tp_degree_must_divide_the_largest_where_sailor_trains() -> None:
    """Its ranks hold whole atoms, of which a layer has as many as the largest degree."""
    here = world(global_batch=2, max_tp=3)
    where = nodes(1)
    (fault,) = check_plan(whole(*where, tp=2), here.job, here.cluster)
    assert fault.what == "2 does not divide the job's largest TP degree of 3"
    assert fault.cure == "use one of 1, 3"
    other = replace(here.job, runtime="megatron-deepspeed")
    assert check_plan(whole(*where, tp=2), other, here.cluster) == ()
