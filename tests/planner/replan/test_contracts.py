"""Placed plans are priced by the contracts of their own nodes, and judged by these prices."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner.replan.damage import RunningPlan
from planner.replan.nodes import PlannerNode, nodes_used, unplaced
from planner.replan.replan_search import ReplanSearch
from planner.replan.replanner import Replan, Replanner
from planner.replan.state_map import placed_stages
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.models.families import build_model
from simulator.spec.job import Job, Objective
from simulator.spec.plan import Pipeline, Plan, Stage

ZONE = "us-central1-a"
ON_DEMAND = Pool(ZONE, "T4", "T4x2", 2, 2, price_usd_per_gpu_hour=15.0, price_source="cluster file")
SPOT = replace(ON_DEMAND, gpus=6, spot=True, price_usd_per_gpu_hour=5.0)
USD = {False: 30.0, True: 10.0}
"""Price of a node per hour, on demand and spot."""
JOB = Job("mix", build_model("gpt2", layers=4, hidden=64, heads=4, vocab=512, sequence=64), 24, 64)
STEADY = PlannerNode("steady", *ON_DEMAND.key, 2)
SPOTS = tuple(PlannerNode(f"spot-{n}", *SPOT.key, 2, spot=True) for n in range(3))


def replanner_for(objective: Objective, *pools: Pool) -> Replanner:
    job = replace(JOB, objective=objective)
    return Replanner(job, Cluster(pools, load_catalogue()), Measurements())


def pipeline_on(node: PlannerNode, micro_batches: int) -> Pipeline:
    """Two stages on the two devices of a node."""
    half = len(JOB.model.layers) // 2
    cuts = ((0, half), (half, len(JOB.model.layers)))
    stages = tuple(
        Stage(cut, 1, (replace(node.place, node=node.id, devices=(device,)),))
        for device, cut in enumerate(cuts)
    )
    return Pipeline(micro_batches, stages)


def running_on(replanner: Replanner, *nodes: PlannerNode) -> RunningPlan:
    """A plan with one pipeline on each node."""
    pipelines = tuple(pipeline_on(node, JOB.global_batch // len(nodes)) for node in nodes)
    return replanner.prepare(Plan(1, pipelines), nodes)


def usd_per_hour(found: Replan | RunningPlan) -> float:
    assert found.estimate is not None
    assert found.estimate.money.compute_usd is not None
    return found.estimate.money.compute_usd / found.estimate.iteration_s * 3600


def test_loss_of_a_spot_node_leaves_a_plan_within_the_limit() -> None:
    """Three nodes cost $50 an hour; at the price of on-demand nodes they would break the limit."""
    replanner = replanner_for(Objective(max_usd_per_hour=80.0), ON_DEMAND, SPOT)
    running = running_on(replanner, STEADY, *SPOTS)
    assert usd_per_hour(running) == pytest.approx(USD[False] + 3 * USD[True])
    found = replanner.replan(running, (STEADY, *SPOTS[1:]))
    assert found.plan is not None, found.problems
    assert nodes_used(found.plan) == {STEADY.id, SPOTS[1].id, SPOTS[2].id}
    assert usd_per_hour(found) == pytest.approx(USD[False] + 2 * USD[True])
    assert found.move is not None
    paid_s = found.move.phases.total_s - found.move.trained_s
    assert found.move.rent_usd == pytest.approx(usd_per_hour(found) * paid_s / 3600)


def test_rented_on_demand_nodes_are_not_priced_as_spot() -> None:
    """The cluster file counts no on-demand machine as up: they were rented since."""
    rented = replace(ON_DEMAND, gpus=0, obtainable_gpus=6)
    replanner = replanner_for(Objective(max_usd_per_hour=50.0), rented, SPOT)
    nodes = tuple(replace(STEADY, id=f"rented-{n}") for n in range(3))
    running = running_on(replanner, *nodes)
    assert usd_per_hour(running) == pytest.approx(3 * USD[False])
    found = replanner.replan(running, nodes[1:])
    assert found.plan is not None, found.problems
    assert usd_per_hour(found) <= 50.0
    assert len(nodes_used(found.plan)) == 1


def test_dollars_of_random_placed_plans_are_the_sum_over_their_nodes() -> None:
    rng = random.Random("contracts")
    for _ in range(30):
        pools = tuple(
            Pool(zone, "T4", "T4x2", 2, rng.choice([0, 2, 4]), rng.choice([0, 8]), spot,
                 rng.uniform(1, 9), "cluster file")
            for zone in (ZONE, "us-central1-b")
            for spot in (False, True)
        )  # fmt: skip
        usd = {(pool.zone, pool.spot): pool.price_usd_per_gpu_hour for pool in pools}
        replanner = replanner_for(Objective(), *pools)
        nodes = [
            PlannerNode(f"node-{n}", *(pool := rng.choice(pools)).key, 2, pool.spot)
            for n in range(rng.choice([1, 2, 3, 4, 6]))
        ]
        running = running_on(replanner, *nodes)
        spot = {node.id: node.spot for node in nodes}
        paid = [usd[place.zone, spot[place.node or ""]] for _, place in placed_stages(running.plan)]
        assert usd_per_hour(running) == pytest.approx(sum(each or 0.0 for each in paid))


def test_devices_without_a_known_contract_are_charged_on_demand_first_over_all_nodes() -> None:
    """A plan file names nodes and no contracts."""
    replanner = replanner_for(Objective(), ON_DEMAND, SPOT)
    plan = running_on(replanner, STEADY, *SPOTS).plan
    found = replanner.judge.estimate(plan)
    assert found.money.compute_usd is not None
    hourly = found.money.compute_usd / found.iteration_s * 3600
    assert hourly == pytest.approx(USD[False] + 3 * USD[True])


def test_rent_is_unknown_if_a_price_is_unknown() -> None:
    unpriced = replace(SPOT, price_usd_per_gpu_hour=None, price_source="unknown")
    replanner = replanner_for(Objective(), ON_DEMAND, unpriced)
    running = running_on(replanner, *SPOTS)
    found = replanner.replan(running, SPOTS[1:])
    assert found.move is not None
    assert found.move.rent_usd is None
    steady = replanner.replan(running_on(replanner, STEADY, SPOTS[0]), (STEADY,))
    assert steady.move is not None
    assert steady.move.rent_usd is not None


def unplaced_on(node: PlannerNode, pipelines: int) -> Plan:
    """Equal pipelines on machines like this node."""
    each = pipeline_on(node, JOB.global_batch // pipelines)
    return Plan(1, (replace(each, stages=tuple(map(unplaced, each.stages))),) * pipelines)


def test_on_demand_nodes_are_taken_before_equal_spot_nodes() -> None:
    replanner = replanner_for(Objective(), ON_DEMAND, SPOT)
    first = replace(SPOTS[0], id="a spot node")
    placed = replanner.place(unplaced_on(STEADY, 1), (first, STEADY))
    assert placed is not None
    assert nodes_used(placed) == {STEADY.id}


def test_a_plan_is_placed_on_other_nodes_if_those_with_its_state_break_a_limit() -> None:
    """The two pipelines move least on their two spot nodes, where the whole plan would be spot."""
    replanner = replanner_for(Objective(max_spot_share=0.5), replace(ON_DEMAND, gpus=4), SPOT)
    lost = replace(STEADY, id="steady-2")
    running = running_on(replanner, *SPOTS[:2], STEADY, lost)
    search = ReplanSearch(replanner, running, (*SPOTS[:2], STEADY), 3)
    found = search.placed_anew(unplaced_on(STEADY, 2))
    assert found is not None
    assert nodes_used(found.plan) == {STEADY.id, SPOTS[0].id}


def test_a_limit_that_no_placed_plan_keeps_is_named() -> None:
    dear = replace(SPOT, gpus=2, price_usd_per_gpu_hour=50.0)
    replanner = replanner_for(Objective(max_usd_per_hour=40.0), ON_DEMAND, dear)
    running = running_on(replanner, STEADY, SPOTS[0])
    found = replanner.replan(running, (SPOTS[0],))
    assert found.plan is None
    assert "max_usd_per_hour" in str(found.problems)
    assert "no node is up" in str(replanner.replan(running, ()).problems)
    search = ReplanSearch(replanner, running, (STEADY, SPOTS[0]), 3)
    assert search.survivors() is None
    assert str(search.why_none()) == (
        "objective.max_usd_per_hour: allows 40, and the nearest plan on the nodes that are up has"
        " 130; relax it, or add nodes"
    )
    assert "fits" in str(ReplanSearch(replanner, running, (STEADY,), 3).why_none())


def test_a_limit_that_pays_for_spot_nodes_only_leaves_a_plan_on_them() -> None:
    replanner = replanner_for(Objective(max_usd_per_hour=12.0), ON_DEMAND, SPOT)
    running = running_on(replanner, SPOTS[0])
    found = replanner.replan(running, (STEADY, *SPOTS[1:]))
    assert found.plan is not None, found.problems
    assert len(nodes_used(found.plan)) == 1
    assert nodes_used(found.plan) <= {SPOTS[1].id, SPOTS[2].id}
    assert usd_per_hour(found) <= 12.0
