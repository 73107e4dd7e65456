"""A plan tied with the running one is not moved to, unless it only adds idle nodes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from planner.api import plan_job
from planner.move_policy.decide_move import judge_move
from planner.move_policy.move_gain import full_pools, offer_of
from planner.move_policy.node_lifetimes import LifetimeHistory
from planner.problem.question import Question
from planner.replan.damage import RunningPlan
from planner.replan.nodes import PlannerNode, cluster_with, nodes_of
from planner.replan.replanner import Replan, Replanner
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.job_file import load_job
from simulator.spec.plan import Pipeline, Place, Plan, Stage

POOL = Pool("us-central1-a", "A100-40", "a2-highgpu-4g", 4, 8)
JOB = load_job(Path(__file__).parents[3] / "examples" / "opt-350m.toml")
PLACE = Place(*POOL.key)
REPLANNER = Replanner(JOB, Cluster((POOL,), load_catalogue()), Measurements())
NODES = nodes_of(REPLANNER.cluster)


def plan_of(pipelines: int, *cuts: int) -> Plan:
    """Equal pipelines with micro batches of four samples."""
    stages = tuple(Stage((a, b), 1, (PLACE,)) for a, b in pairwise(cuts))
    each = Pipeline(JOB.global_batch // 4 // pipelines, stages)
    return Plan(4, (each,) * pipelines, together=1)


def moved(
    before: Plan, after: Plan, nodes: tuple[PlannerNode, ...] = NODES
) -> tuple[RunningPlan, Replan]:
    placed = REPLANNER.place(before, nodes)
    assert placed is not None
    running = REPLANNER.prepare(placed, nodes)
    found = REPLANNER.replan_as(running, NODES, after)
    assert found is not None
    return running, found


def reason_to_stay(running: RunningPlan, found: Replan, **ages: float) -> str:
    age_s = {node.id: 1e6 for node in NODES} | ages
    verdict = judge_move(
        offer_of(running, found, NODES, goal="throughput", age_s=age_s),
        LifetimeHistory(),
        now_s=1e6,
    )
    return "" if verdict.moves else verdict.reason


def test_a_job_stays_if_the_better_plan_is_within_the_error_bar() -> None:
    """Pairs of stages are 1 % faster than whole pipelines, ±5 %."""
    running, found = moved(plan_of(8, 0, 26), plan_of(4, 0, 14, 26))
    assert found.estimate is not None
    share = running.estimate.iteration_s / found.estimate.iteration_s - 1
    assert 0 < share < 0.05
    assert "±5.0%: cannot be told apart" in reason_to_stay(running, found)
    # Twice as fast is more than the error bar.
    slow = replace(running.estimate, iteration_s=2 * running.estimate.iteration_s)
    assert reason_to_stay(replace(running, estimate=slow), found) == ""


def test_idle_nodes_are_taken_up_for_less_than_the_error_bar() -> None:
    running, found = moved(plan_of(4, 0, 26), plan_of(4, 0, 14, 26), NODES[:1])
    assert found.estimate is not None
    near = replace(running.estimate, iteration_s=1.01 * found.estimate.iteration_s)
    assert reason_to_stay(replace(running, estimate=near), found) == ""


def test_a_pool_is_full_once_its_machines_of_all_types_are_up() -> None:
    small = replace(POOL, machine="a2-highgpu-1g", gpus_per_machine=1, gpus=2)
    cluster = Cluster((small, POOL), load_catalogue())
    everything = nodes_of(cluster)
    assert full_pools(cluster, [node for node in everything if node.gpus == 1]) == frozenset()
    assert full_pools(cluster, everything) == {"A100-40@us-central1-a"}
    assert (
        full_pools(replace(cluster, pools=(replace(small, obtainable_gpus=1),)), everything[:2])
        == frozenset()
    )


def test_a_job_that_stays_says_how_much_worse_it_is_to_use_the_idle_nodes() -> None:
    """A machine of T4s in another region makes every plan with it slower."""
    slow = Pool("europe-west4-b", "T4", "n1-standard-32-t4-4", 4, 4)
    cluster = Cluster((replace(POOL, gpus=4), slow), load_catalogue())
    replanner, nodes = Replanner(JOB, cluster, Measurements()), nodes_of(cluster)
    fast = tuple(node for node in nodes if node.zone == POOL.zone)
    answer = plan_job(Question(JOB, cluster_with(cluster, fast), Measurements()))
    assert answer.plan is not None
    placed = replanner.place(answer.plan, fast)
    assert placed is not None
    running = replanner.prepare(placed, fast)
    found = replanner.improve(running, nodes)
    assert found.plan == running.plan
    assert found.with_idle is not None
    longer = found.with_idle.estimate.iteration_s / running.estimate.iteration_s - 1
    age_s = {node.id: 1e6 for node in nodes}
    offer = offer_of(running, found, nodes, goal="throughput", age_s=age_s)
    verdict = judge_move(offer, LifetimeHistory(), now_s=1e6)
    assert longer > 0
    told = f"no better plan found: the best one with idle nodes is {longer:.1%} slower"
    assert verdict.reason == told
    assert replanner.improve(running, fast).with_idle is None
