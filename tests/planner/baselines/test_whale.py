"""The Whale-style split against golden shares and cuts, by hand, and on small real cases."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.baselines.shared.equal_nodes import Degrees
from planner.baselines.whale.planner import (
    Split,
    WhaleInputs,
    WhalePlanner,
    balance,
    rooms_of,
    split_batch,
    split_layers,
    to_plan,
)
from simulator.estimate.memory import MemoryModel
from simulator.inputs.plan_check import check_plan
from simulator.models.families import build_model
from simulator.spec.plan import Place
from tests.planner.baselines.golden_inputs import load_golden, load_toy
from tests.planner.baselines.small_case import pool, small_case


def test_golden_batch_splits(reference):
    for case in load_golden(reference, "whale")["batch_split"]:
        assert list(split_batch(case["batch"], case["weights"]) or ()) == case["split"]


def test_golden_layer_splits(reference):
    toy = load_toy(reference)
    forward = toy.forward_ms("A100-40", tp=1, samples=1)
    backward = toy.backward_ms("A100-40", tp=1, samples=1)
    costs = [a + b for a, b in zip(forward, backward, strict=True)]
    for case in load_golden(reference, "whale")["layer_split"]["cases"]:
        assert list(split_layers(costs, case["weights"])) == case["cuts"]


def test_ties_of_the_remainder_go_to_the_lower_index():
    assert split_batch(5, [1, 1, 1]) == (2, 2, 1)


def test_excess_micro_batches_move_to_replicas_with_room():
    assert split_batch(12, [2, 1, 1]) == (6, 3, 3)
    assert split_batch(12, [2, 1, 1], [2, 12, 12]) == (2, 5, 5)
    assert split_batch(12, [2, 1, 1], [2, 4, 12]) == (2, 4, 6)
    assert split_batch(12, [2, 1, 1], [2, 4, 5]) is None


@given(
    batch=st.integers(0, 60),
    replicas=st.lists(st.tuples(st.floats(0.1, 10), st.integers(0, 30)), min_size=1, max_size=6),
)
def test_shares_make_up_the_batch_and_stay_within_rooms(batch, replicas):
    weights, rooms = zip(*replicas, strict=True)
    shares = split_batch(batch, weights, rooms)
    if sum(rooms) < batch:
        assert shares is None
        return
    assert shares is not None
    assert sum(shares) == batch
    assert all(share <= room for share, room in zip(shares, rooms, strict=True))
    if all(room >= batch for room in rooms):
        exact = [Fraction(weight) for weight in weights]
        quotas = [batch * weight / sum(exact) for weight in exact]
        assert all(abs(a - b) < 1 for a, b in zip(shares, quotas, strict=True))


def test_cuts_take_the_nearest_boundary_and_leave_no_stage_empty():
    assert split_layers([1, 1, 1, 1], [1, 1]) == (0, 2, 4)
    assert split_layers([1, 1, 1], [1, 1]) == (0, 1, 3)  # A tie: the lower boundary.
    assert split_layers([100, 1, 1, 1], [1, 1, 1]) == (0, 1, 2, 4)
    assert split_layers([1, 1, 1, 100], [1, 1, 1]) == (0, 2, 3, 4)


def test_layers_follow_stages_and_micro_batches_follow_replicas():
    inputs = WhaleInputs(12, (1.0,) * 6, speeds=((2.0, 2.0), (1.0, 1.0)))
    assert balance(inputs) == Split((0, 4, 6), (6, 6))
    # The second replica's last stage is half as fast as the first one's.
    inputs = WhaleInputs(100, (1.0,) * 7, speeds=((2.0, 2.0), (2.0, 1.0)))
    assert balance(inputs) == Split((0, 4, 7), (60, 40))  # 2 in 4 layers, 1 in 3.
    assert balance(inputs, lambda cuts: [cuts[1], 100]) == Split((0, 4, 7), (4, 96))


@dataclass
class Capacity:
    """Sites whose every device has the same memory."""

    bytes: float

    def capacity_bytes(self, _: Place) -> float:
        return self.bytes


def test_a_replica_takes_as_many_micro_batches_as_it_can_have_in_flight():
    case, shape, cuts = (
        small_case(pool("A100-40", 4, per_machine=4)),
        Degrees(1, 2, 2, 1),
        (0, 22, 26),
    )
    held = []
    for count in (1, 2):
        plan = to_plan(Split(cuts, (count, count)), case, shape)
        devices = MemoryModel(plan, case.costs, case.facts.capacity_bytes).pipelines()[0]
        held.append(max(device.total for device in devices))
    assert held[0] < held[1]
    for capacity, room in ((held[1], 64), ((held[0] + held[1]) / 2, 1), (held[0] - 1, 0)):
        tight = replace(case, facts=Capacity(capacity))
        assert rooms_of(tight, shape, cuts) == [room, room]


def test_a_replica_without_micro_batches_stays_idle():
    case, shape = small_case(pool("A100-40", 4, per_machine=4)), Degrees(1, 2, 2, 1)
    plan = to_plan(Split((0, 13, 26), (64, 0)), case, shape)
    assert [pipeline.micro_batches for pipeline in plan.pipelines] == [64]
    assert check_plan(plan, case.job, case.cluster) == ()


@pytest.mark.parametrize("mode", ["fixed", "published"])
def test_faster_gpus_of_a_real_case_get_more(mode):
    case = small_case(pool("A100-40", 4, per_machine=4), pool("V100-16", 4, per_machine=4))
    (found,) = WhalePlanner().proposals(case, mode)
    assert math.isnan(found.seconds)
    assert found.plan is not None
    assert check_plan(found.plan, case.job, case.cluster) == ()
    counts = {p.stages[0].place.gpu: p.micro_batches for p in found.plan.pipelines}
    assert counts["A100-40"] > counts["V100-16"]


def test_the_kind_with_more_memory_comes_first_in_a_pipeline():
    model = build_model("opt", layers=12, hidden=2048, heads=32, vocab=8192, sequence=2048)
    pools = (pool("RTX-2080", 2, per_machine=2), pool("V100-16", 2, per_machine=2))
    case = small_case(*pools, max_tp=1, model=model)
    (found,) = WhalePlanner().proposals(case, "fixed")
    assert found.plan is not None
    assert check_plan(found.plan, case.job, case.cluster) == ()
    for pipeline in found.plan.pipelines:
        assert pipeline.stages[0].place.gpu == "V100-16"
        assert pipeline.stages[-1].place.gpu == "RTX-2080"
