"""The planner compares the plan without a straggler with continuing at its speed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from agents.protocol.records import NodeId, NodeRecord
from planner.replan.nodes import nodes_used
from sailord.planning.live_cluster import planner_node
from sailord.planning.messages import FoundPlan, PlanRequest
from sailord.planning.plan_search import answer, replanner_for
from sailord.planning.precomputed import PrecomputedPlans
from simulator.documents.files import parse_document
from simulator.inputs.plan_file import plan_from_document
from simulator.spec.plan import Plan
from tests.sim.planners import CLUSTER, SPEC

NODES = tuple(
    NodeRecord(NodeId(f"n{k}"), f"m{k}", "us-central1-a", "V100-16x1", "V100-16", 1, f"h{k}:1")
    for k in range(4)
)
SLOW = NODES[1]
OTHERS = tuple(node for node in NODES if node is not SLOW)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slow") / "cluster.toml"
    path.write_text(CLUSTER, encoding="utf-8")
    return path


@cache
def running(cluster: Path) -> FoundPlan:
    """The plan for all four nodes; each is used."""
    found = answer(PlanRequest(SPEC, cluster, None, NODES, None, ()))
    assert isinstance(found, FoundPlan)
    assert set(found.proposal.members) == {node.id for node in NODES}
    return found


def plan_of(found: FoundPlan) -> Plan:
    return plan_from_document(parse_document(found.plan, name="plan"))


def asked(cluster: Path, times: float) -> PlanRequest:
    return PlanRequest(
        *(SPEC, cluster, None, OTHERS, running(cluster).plan, NODES),
        slow=((SLOW.id, times),),
    )


def test_plan_predicts_compute_seconds_of_each_rank(cluster):
    busy = running(cluster).proposal.busy
    assert busy is not None
    plan = plan_of(running(cluster))
    assert len(busy.seconds) == plan.device_count
    assert all(0 < seconds < running(cluster).proposal.iteration_s for seconds in busy.seconds)
    assert busy.relative_error > 0


@pytest.mark.parametrize(("times", "is_worth_it"), [(1.02, False), (4.0, True)])
def test_straggler_is_dropped_only_if_it_is_slow_enough(cluster, times, is_worth_it):
    found = answer(asked(cluster, times))
    assert isinstance(found, FoundPlan)
    assert SLOW.id not in found.proposal.members
    assert found.proposal.is_worth_it == is_worth_it, found.proposal.why
    plan = plan_of(found)
    assert SLOW.id not in nodes_used(plan)


def test_straggler_slows_its_pipeline_and_all_that_wait_for_it(cluster):
    before = plan_of(running(cluster))
    question = PlanRequest(SPEC, cluster, None, NODES, running(cluster).plan, NODES)
    judge = replanner_for(question, [planner_node(node) for node in NODES]).judge
    plain = judge.estimate(before)
    same = judge.estimate_on(before, {}, times_slower={SLOW.id: 1.0, "another": 9.0})
    assert same.iteration_s == plain.iteration_s
    slow = judge.estimate_on(before, {}, times_slower={SLOW.id: 3.0})
    assert slow.iteration_s > plain.iteration_s
    all_slow = judge.estimate_on(before, {}, times_slower={node.id: 3.0 for node in NODES})
    assert slow.iteration_s <= all_slow.iteration_s
    busiest = max(time.compute_s for times in plain.stages for time in times)
    assert slow.iteration_s >= min(time.compute_s for times in plain.stages for time in times) * 3
    assert max(time.compute_s for times in slow.stages for time in times) <= busiest * 3 * 1.001


def test_precomputed_loss_does_not_answer_a_straggler_request(cluster):
    ahead = PrecomputedPlans(replace(asked(cluster, 4.0), nodes=NODES, slow=()))
    lost = answer(replace(asked(cluster, 4.0), slow=()))
    assert isinstance(lost, FoundPlan)
    ahead.add(frozenset({SLOW.id}), frozenset(node.id for node in NODES), lost)
    assert ahead.answer(replace(asked(cluster, 4.0), slow=())) == lost
    assert ahead.answer(asked(cluster, 4.0)) is None


def test_measured_compute_factors_scale_both_plans(cluster):
    """If all GPUs take three times the predicted time, so does the new plan."""
    plain = answer(asked(cluster, 4.0))
    seen = answer(replace(asked(cluster, 4.0), factors=(("V100-16", 3.0),)))
    assert isinstance(plain, FoundPlan)
    assert isinstance(seen, FoundPlan)
    assert seen.proposal.plan == plain.proposal.plan
    assert 1 < seen.proposal.iteration_s / plain.proposal.iteration_s <= 3
    assert seen.proposal.busy == plain.proposal.busy, (
        "later measurements are compared with plain predictions"
    )
