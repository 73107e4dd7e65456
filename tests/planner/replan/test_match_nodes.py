"""The nodes that a plan without names ran on, by the machines of a cluster file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.replan.match_nodes import match_nodes, with_pools_of
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.spec.plan import Pipeline, Plan, Stage

HERE = Pool("us-central1-a", "A100-40", "a2-highgpu-4g", 4, 0, obtainable_gpus=4)
THERE = replace(HERE, zone="us-central1-b", gpus=8)
PLAN = Plan(1, (Pipeline(1, (Stage((0, 6), 2, (HERE.place,)),)),) * 2)


@pytest.mark.parametrize("pools", [(HERE, THERE), (THERE,)])
def test_a_place_of_which_nothing_is_up_had_whole_machines(pools: tuple[Pool, ...]) -> None:
    """Nodes have the size of whole machines: two groups of two GPUs may have shared one."""
    cluster = with_pools_of(Cluster(pools, load_catalogue()), PLAN)
    before = match_nodes(PLAN, cluster).before
    assert [node.gpus for node in before] == [4, 4]
