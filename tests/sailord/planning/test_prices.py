"""Where dollars count, a node of unknown price is left out, and stops no question."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agents.protocol.records import NodeId
from planner.problem.objective import LimitedFigures, Limits
from sailord.planning.capacity_search import choose_capacity
from sailord.planning.live_cluster import cluster_of, planner_node
from sailord.planning.messages import CapacityRequest, FoundPlan, PoolPrice, PoolSupply
from sailord.planning.plan_search import answer, precompute_next, start_precomputing
from sailord.planning.precomputed import PrecomputedPlans
from simulator.spec.job import Objective
from tests.sailord.planning.requests import NODES, QUESTION, SPEC, node

OBJECTIVES = ('goal = "cost"', "max_usd_per_hour = 100.0")
POOL = """
[[pool]]
zone = "us-central1-b"
gpu = "RTX-3090"
gpus_per_machine = 2
gpus = 6
price_usd_per_gpu_hour = 1.0
"""
UNPRICED = replace(node("d"), machine="RTX-3090x2", gpu="RTX-3090")


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_node_of_unknown_price_is_left_out_and_named(objective: str) -> None:
    question = replace(QUESTION, spec=f"{SPEC}\n[objective]\n{objective}\n")
    first = answer(replace(question, nodes=(*NODES, UNPRICED)))
    assert isinstance(first, FoundPlan), first
    assert UNPRICED.id not in first.proposal.members
    (told,) = (why for why in first.about["why"] if why.startswith("not used"))
    assert "RTX-3090x2 in us-central1-b" in told
    runs = replace(question, running=first.plan, ran_on=NODES)
    lost = first.proposal.members[0]
    left = (*(each for each in NODES if each.id != lost), UNPRICED)
    after = answer(replace(runs, nodes=left, is_urgent=True))
    assert isinstance(after, FoundPlan), after
    assert UNPRICED.id not in after.proposal.members
    start_precomputing(replace(runs, nodes=(*NODES, UNPRICED)))
    stored = precompute_next()
    assert stored is not None
    assert isinstance(stored[2], FoundPlan)
    assert UNPRICED.id not in stored[2].proposal.members


def test_unpriced_spot_node_of_a_priced_machine_type_stops_no_question(tmp_path: Path) -> None:
    """They share a place, and only the contract tells them apart."""
    file = tmp_path / "cluster.toml"
    file.write_text(POOL)
    question = replace(QUESTION, spec=f'{SPEC}\n[objective]\ngoal = "cost"\n', cluster_file=file)
    priced = tuple(replace(each, gpu="RTX-3090", machine="RTX-3090x2") for each in NODES)
    spot = replace(priced[0], id=NodeId("s.1"), name="s", spot=True)
    first = answer(replace(question, nodes=(*priced, spot)))
    assert isinstance(first, FoundPlan), first
    assert spot.id not in first.proposal.members
    runs = replace(question, running=first.plan, ran_on=priced)
    again = answer(replace(runs, nodes=(*priced, spot)))
    assert isinstance(again, FoundPlan), again
    lost = replace(runs, nodes=(*priced[1:], spot), is_urgent=True)
    after = answer(lost)
    assert isinstance(after, FoundPlan), after
    assert spot.id not in after.proposal.members


def test_nodes_of_the_providers_pools_cost_what_it_charges(tmp_path: Path) -> None:
    """A job's bill is its plan's price, so it agrees with what `capacity` shows."""
    file = tmp_path / "cluster.toml"
    file.write_text(POOL)
    machine = replace(NODES[0], gpu="RTX-3090", machine="RTX-3090x2")
    own = replace(QUESTION, cluster_file=file, nodes=(machine,))
    rented = PoolPrice(machine.zone, machine.machine, machine.gpu, False, 2.5)
    asked = [
        own,
        replace(own, prices=(rented,)),
        replace(own, prices=(replace(rented, spot=True),)),
    ]
    found = [answer(each) for each in asked]
    assert all(isinstance(each, FoundPlan) for each in found)
    prices = [each.proposal.usd_per_hour for each in found]  # The plan uses one GPU.
    assert prices == pytest.approx([1.0, 2.5, 1.0])
    runs = replace(own, running=found[0].plan, ran_on=(machine,))
    ahead = PrecomputedPlans(runs)
    ahead.add(frozenset(), frozenset(), answer(runs))
    assert ahead.answer(runs) is not None
    assert ahead.answer(replace(runs, prices=(rented,))) is None, "it had another price"


def test_prices_of_the_network_file_count(tmp_path: Path) -> None:
    prices = {"simulations_constants_GPU_PRICES": {"RTX-3090": {"us-central1-b": 1.5}}}
    network = {"sizes_bytes": [1, 2], "curves": [], "gpu_price_usd_per_hour": prices}
    (tmp_path / "network.json").write_text(json.dumps(network))
    question = replace(QUESTION, spec=f'{SPEC}\n[objective]\ngoal = "cost"\n', nodes=(UNPRICED,))
    assert isinstance(answer(replace(question, profiles=tmp_path)), FoundPlan)


def test_nodes_of_unknown_price_alone_are_no_cluster() -> None:
    question = replace(QUESTION, spec=f'{SPEC}\n[objective]\ngoal = "cost"\n', nodes=(UNPRICED,))
    found = answer(question)
    assert isinstance(found, str)
    assert "no price is known" in found


def test_machine_that_the_cluster_file_does_not_list_has_the_catalogues_price() -> None:
    rented = replace(node("e"), zone="us-central1-a", machine="a2-highgpu-1g", gpus=1, spot=True)
    pools = cluster_of(QUESTION.cluster_file, [planner_node(rented)]).pools
    (added,) = (pool for pool in pools if pool.machine == "a2-highgpu-1g" and pool.spot)
    assert added.price_usd_per_gpu_hour is not None
    assert added.price_source == "catalogue"


@pytest.mark.slow
def test_unpriced_node_that_is_up_keeps_no_instance_from_being_rented() -> None:
    spec = f'{SPEC}\n[objective]\ngoal = "cost"\n'
    own = PoolSupply("us-central1-b", "RTX-3090x2", "RTX-3090", 2, False, 1, 0, None)
    rented = PoolSupply("us-central1-b", "A100-40x2", "A100-40", 2, True, 0, 1, 2.0)
    question = CapacityRequest(spec, QUESTION.cluster_file, None, (own, rented), None, 60.0)
    assert choose_capacity(question).counts is not None


@pytest.mark.parametrize(
    "objective", [Objective(goal="cost"), Objective(max_usd_per_hour=1.0), Objective()]
)
def test_plan_of_unknown_price_has_no_score_where_dollars_count(objective: Objective) -> None:
    score = Limits(objective).score(LimitedFigures(1.0, None, 0.0))
    assert (score is None) == (objective != Objective())
