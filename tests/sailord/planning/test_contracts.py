"""What a proposal costs follows from the contracts of its nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agents.protocol.records import NodeId, NodeRecord
from sailord.planning.messages import FoundPlan, PlanRequest
from sailord.planning.plan_search import answer
from tests.sailord.planning import requests
from tests.sim.planners import SPEC

ON_DEMAND = """
[[pool]]
zone = "us-central1-a"
gpu = "V100-16"
gpus_per_machine = 1
gpus = 0
obtainable_gpus = 8
price_usd_per_gpu_hour = 30.0
"""
SPOT = ON_DEMAND.replace("30.0", "10.0") + "spot = true\n"
NODES = tuple(
    NodeRecord(
        *(NodeId(f"n{k}"), f"m{k}", "us-central1-a", "V100-16x1", "V100-16", 1, f"h{k}:1"),
        spot=k > 0,
    )
    for k in range(4)
)
"""One node on demand, three on spot."""


def paid(found: FoundPlan) -> float:
    """What the nodes of a proposal cost an hour."""
    spot = {node.id: node.spot for node in NODES}
    return sum(10.0 if spot[name] else 30.0 for name in found.proposal.members)


@pytest.fixture
def both(tmp_path: Path) -> Path:
    path = tmp_path / "both.toml"
    path.write_text(ON_DEMAND + SPOT, encoding="utf-8")
    return path


def test_a_lost_spot_node_leaves_a_proposal_at_its_nodes_prices(both: Path):
    spec = SPEC + "\n[objective]\nmax_usd_per_hour = 80\n"
    first = answer(PlanRequest(spec, both, None, NODES, None, ()))
    assert isinstance(first, FoundPlan)
    assert set(first.proposal.members) == {node.id for node in NODES}
    assert first.proposal.usd_per_hour == pytest.approx(60.0)
    for lost in NODES[0], NODES[-1]:
        left = tuple(node for node in NODES if node is not lost)
        found = answer(PlanRequest(spec, both, None, left, first.plan, NODES))
        assert isinstance(found, FoundPlan)
        assert found.proposal.usd_per_hour == pytest.approx(paid(found))


def test_a_straggler_is_judged_at_its_nodes_prices(both: Path):
    first = answer(PlanRequest(SPEC, both, None, NODES, None, ()))
    assert isinstance(first, FoundPlan)
    left, slow = NODES[:-1], ((NODES[-1].id, 4.0),)
    found = answer(PlanRequest(SPEC, both, None, left, first.plan, NODES, slow=slow))
    assert isinstance(found, FoundPlan)
    assert found.proposal.usd_per_hour == pytest.approx(paid(found))


def test_lost_nodes_that_a_new_leader_never_saw_do_not_stop_a_job_that_counts_dollars(
    tmp_path: Path,
):
    """Where all machines are spot, they were so too; on demand they would have no price."""
    path = tmp_path / "spot.toml"
    path.write_text(SPOT, encoding="utf-8")
    spec = requests.SPEC + "\n[objective]\nmax_usd_per_hour = 80\n"
    first = answer(PlanRequest(spec, path, None, NODES[1:], None, ()))
    assert isinstance(first, FoundPlan)
    slow = min(first.proposal.members)
    left = tuple(node for node in NODES[1:] if node.id != slow)
    request = PlanRequest(spec, path, None, left, first.plan, NODES[1:], slow=((slow, 4.0),))
    told, untold = answer(request), answer(replace(request, ran_on=left))
    assert isinstance(told, FoundPlan)
    assert isinstance(untold, FoundPlan), untold
    assert untold.proposal.plan == told.proposal.plan
    assert untold.proposal.usd_per_hour == told.proposal.usd_per_hour


def test_a_first_plan_is_priced_by_the_nodes_on_which_it_is_placed(tmp_path: Path):
    """A group of two GPUs fits the spot node alone, and the search charges on demand first."""
    path = tmp_path / "pairs.toml"
    path.write_text((ON_DEMAND + SPOT).replace("machine = 1", "machine = 2"), encoding="utf-8")
    pair = [replace(node, machine="V100-16x2") for node in NODES[:2]]
    spec = (
        SPEC.replace("layers = 6", "layers = 1")
        .replace("= 240", "= 1")
        .replace("_tp = 1", "_tp = 2")
    )
    found = answer(PlanRequest(spec, path, None, (pair[0], replace(pair[1], gpus=2)), None, ()))
    assert isinstance(found, FoundPlan)
    assert found.proposal.members == (NODES[1].id,)
    assert found.proposal.usd_per_hour == pytest.approx(2 * 10.0)


def test_a_first_plan_whose_limit_pays_for_spot_nodes_only_is_placed_on_them(both: Path):
    spec = SPEC + "\n[objective]\nmax_usd_per_hour = 25\n"
    found = answer(PlanRequest(spec, both, None, NODES, None, ()))
    assert isinstance(found, FoundPlan), found
    assert NODES[0].id not in found.proposal.members
    assert found.proposal.usd_per_hour == pytest.approx(paid(found))
    assert paid(found) <= 25.0
