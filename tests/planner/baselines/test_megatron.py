"""The Megatron rule of thumb against golden shapes, by hand, and on a small real case."""

from __future__ import annotations

import dataclasses
import math

import pytest

from planner.baselines.amp.planner import AmpPlanner
from planner.baselines.atlas.planner import AtlasPlanner
from planner.baselines.megatron.planner import (
    MegatronInputs,
    MegatronPlanner,
    search,
    stage_bytes_max,
)
from planner.baselines.shared.equal_nodes import Degrees, equal_nodes
from planner.baselines.varuna.planner import VarunaPlanner
from planner.baselines.whale.planner import WhalePlanner
from simulator.inputs.plan_check import check_plan
from simulator.models.families import build_model
from simulator.spec.plan import equal_cuts
from tests.planner.baselines.golden_inputs import load_golden, load_toy
from tests.planner.baselines.small_case import pool, small_case

INPUTS = MegatronInputs(
    gpus=8,
    gpus_per_node=4,
    memory_bytes=200.0,
    global_batch=8,
    micro_batches=(1, 2),
    parameters={tp: [8 / tp] * 4 for tp in (1, 2, 4)},
    kept_bytes={(tp, b): [2 * b / tp] * 4 for tp in (1, 2, 4) for b in (1, 2)},
)


def test_golden(reference):
    golden, toy = load_golden(reference, "megatron_rule"), load_toy(reference)
    degrees, sizes = (1, 2, 4), (1, 2, 4, 8)
    for case in golden["cases"]:
        inputs = MegatronInputs(
            gpus=case["gpus"],
            gpus_per_node=case["gpus_per_node"],
            memory_bytes=case["memory_GiB"] * 2**30,
            global_batch=golden["gbs"],
            micro_batches=sizes,
            parameters={tp: toy.parameters(tp) for tp in degrees},
            kept_bytes={(t, b): toy.kept_bytes(tp=t, samples=b) for t in degrees for b in sizes},
        )
        shape = search(
            inputs, lambda x, inputs=inputs: stage_bytes_max(inputs, x) <= inputs.memory_bytes
        )
        wanted = case["plan"]
        if wanted is None:
            assert shape is None
        else:
            assert shape == Degrees(wanted["tp"], wanted["dp"], wanted["pp"], wanted["mbs"])
            bytes_max = stage_bytes_max(inputs, shape)
            assert bytes_max == pytest.approx(wanted["max_stage_bytes"], rel=1e-9)


def test_memory_of_a_pipeline_by_hand():
    # Two stages of two layers; the first keeps two micro batches, the second one.
    assert stage_bytes_max(INPUTS, Degrees(1, 4, 2, 1)) == 16 * 16 + 4 * 2
    # With a single micro batch nothing more than that is in flight.
    assert stage_bytes_max(INPUTS, Degrees(1, 4, 2, 2)) == 16 * 16 + 8 * 1


@pytest.mark.parametrize(
    ("memory", "shape"),
    [
        (530, Degrees(1, 8, 1, 1)),
        (519, Degrees(2, 4, 1, 2)),  # Plain data parallelism needs 512 + 8.
        (263, Degrees(2, 4, 1, 1)),
        (259, Degrees(4, 2, 1, 2)),
        (100, Degrees(4, 1, 2, 2)),
        (67, Degrees(4, 1, 2, 1)),  # 64 of state, and two micro batches in flight of 1 each.
        (65, None),
    ],
)
def test_tp_grows_before_the_pipeline_does(memory, shape):
    inputs = dataclasses.replace(INPUTS, memory_bytes=memory)
    assert search(inputs, lambda x: stage_bytes_max(inputs, x) <= inputs.memory_bytes) == shape


def test_layers_that_remain_go_to_the_last_stages():
    assert equal_cuts(14, 4) == (0, 3, 6, 10, 14)


def test_equal_nodes_leave_out_the_fewest_gpus():
    case = small_case(pool("A100-40", 10, per_machine=4), pool("V100-16", 8, per_machine=8))
    nodes = equal_nodes(case.cluster, ["V100-16", "A100-40"])
    assert nodes.gpus_per_node == 4
    assert [place.gpu for place in nodes.places] == ["A100-40"] * 2 + ["V100-16"] * 2
    assert [place.gpu for place in nodes.groups(2)] == ["A100-40"] * 4 + ["V100-16"] * 4
    assert equal_nodes(case.cluster, ["T4"]).gpus == 0
    # Halves serve all machines here, the rest of one included.
    pools = pool("A100-40", 10, per_machine=4), pool("V100-16", 2, per_machine=2)
    both = ["A100-40", "V100-16"]
    assert equal_nodes(small_case(*pools).cluster, both).gpus == 12
    # Nodes of four leave out as many as nodes of six: the larger ones.
    pools = pool("A100-40", 12, per_machine=6), pool("V100-16", 4, per_machine=4)
    nodes = equal_nodes(small_case(*pools).cluster, both)
    assert (nodes.gpus_per_node, nodes.gpus) == (6, 12)


def test_the_order_of_pools_changes_nothing():
    pools = [
        pool("V100-16", 4, per_machine=4, zone="us-east1-b"),
        pool("A100-40", 4, per_machine=4, zone="us-east1-b"),
        pool("A100-40", 4, per_machine=4),
    ]
    one, other = small_case(*pools), small_case(*reversed(pools))
    kinds = ["A100-40", "V100-16"]
    assert equal_nodes(one.cluster, kinds) == equal_nodes(other.cluster, kinds)
    for planner in (
        MegatronPlanner(),
        WhalePlanner(),
        AtlasPlanner(),
        AmpPlanner(),
        VarunaPlanner(),
    ):
        plans = [proposal.plan for proposal in planner.proposals(one, "fixed")]
        assert plans
        assert plans == [proposal.plan for proposal in planner.proposals(other, "fixed")]


@pytest.mark.parametrize("mode", ["fixed", "published"])
def test_plan_of_a_real_case(mode):
    case = small_case(pool("A100-40", 8, per_machine=4), pool("V100-16", 8, per_machine=4))
    (found,) = MegatronPlanner().proposals(case, mode)
    assert math.isnan(found.seconds)
    assert found.plan is not None
    assert found.plan.device_count == 16
    assert check_plan(found.plan, case.job, case.cluster) == ()


def test_nothing_is_proposed_if_nothing_fits():
    large = build_model("opt", layers=24, hidden=4096, heads=32, vocab=50272, sequence=2048)
    case = small_case(pool("RTX-2080", 2, per_machine=2), model=large)
    assert list(MegatronPlanner().proposals(case, "fixed")) == []
    assert list(MegatronPlanner().proposals(small_case(), "fixed")) == []
