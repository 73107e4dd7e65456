"""The GPUs of one kind: handing them out, folding stages, sharing batches, ranking proposals."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner.baselines.shared.equal_gpus import (
    ReplicatedStage,
    even_counts,
    fleet_bytes_per_s,
    fleets_of,
    folded,
    hand_out_stages,
    tp_degrees,
)
from planner.baselines.shared.proposals import micro_batch_sizes, proposal, ranked
from simulator.estimate.memory import state_bytes_per_parameter
from simulator.spec.plan import Pipeline, Plan
from tests.planner.baselines.small_case import pool, small_case

MIXED = (
    pool("V100-16", 2, per_machine=2),
    pool("A100-40", 6, per_machine=4),
    pool("A100-40", 4, per_machine=4, zone="us-west1-a"),
)


def test_fleets_hold_machines_by_kind_and_zone_with_the_rest_of_a_pool():
    a100, v100 = fleets_of(small_case(*MIXED))
    assert (a100.gpu, v100.gpu) == ("A100-40", "V100-16")
    assert [(place.zone, gpus) for place, gpus in a100.machines] == [
        ("us-central1-a", 4),
        ("us-central1-a", 2),
        ("us-west1-a", 4),
    ]
    assert (a100.gpus, a100.gpus_per_machine, v100.gpus_per_machine) == (10, 4, 2)


def test_a_pool_without_gpus_is_no_fleet():
    assert fleets_of(small_case(pool("A100-40", 0, per_machine=4))) == ()


def test_groups_are_handed_out_without_holes():
    (fleet,) = fleets_of(small_case(pool("A100-40", 8, per_machine=4)))
    # In the order given, the single GPU would break the first machine for the groups of four.
    assert fleet.hand_out([1, 4, 2, 1]) is not None
    assert fleet.hand_out([1, 4, 4]) is None
    assert fleet.hand_out([8]) is None
    assert fleet.hand_out([2, 2, 2, 2]) is not None
    assert fleet.hand_out([3, 3, 1, 1]) is not None
    assert fleet.hand_out([3, 3, 2]) is None


def test_larger_groups_take_the_first_zone():
    a100, _ = fleets_of(small_case(*MIXED))
    places = a100.hand_out([2, 4, 4])
    assert places is not None
    assert [place.zone for place in places] == ["us-central1-a", "us-central1-a", "us-west1-a"]


def test_a_group_that_no_order_fits_is_refused_and_any_other_is_not():
    (fleet,) = fleets_of(small_case(pool("A100-40", 14, per_machine=4)))
    rng = random.Random(1)
    refused = 0
    for _ in range(200):
        tps = [rng.choice([1, 2, 4]) for _ in range(rng.randint(1, 8))]
        # Powers of two fill machines of 4, 4, 4 and 2 completely if the fours find their three.
        fits = sum(tps) <= 14 and tps.count(4) <= 3
        assert (fleet.hand_out(tps) is not None) == fits
        refused += not fits
    assert 0 < refused < 200


def test_stages_get_their_replicas_side_by_side():
    a100, _ = fleets_of(small_case(*MIXED))
    shapes = [ReplicatedStage((0, 5), 2, 1), ReplicatedStage((5, 26), 2, 1)]
    found = hand_out_stages(a100, [shapes] * 2)
    assert found is not None
    # Both first stages, then both second ones: the last group of the first zone is a second.
    zones = [[stage.place.zone for stage in stages] for stages in found]
    assert zones == [["us-central1-a"] * 2, ["us-central1-a", "us-west1-a"]]
    assert hand_out_stages(a100, [shapes] * 3) is None


@pytest.mark.parametrize(
    ("replicas", "pipelines", "each"),
    [((4, 4), 4, [1, 1]), ((2, 4, 2), 2, [1, 2, 1]), ((3, 2), 1, [3, 2])],
)
def test_equal_degrees_are_pipelines_and_the_rest_is_split(replicas, pipelines, each):
    rows = folded([ReplicatedStage((i, i + 1), 1, n) for i, n in enumerate(replicas)])
    assert [[shape.replicas for shape in row] for row in rows] == [each] * pipelines


def test_batches_are_met_exactly_or_refused():
    job = small_case(*MIXED).job
    assert even_counts(job, size=2, pipelines=3) == [11, 11, 10]
    assert even_counts(job, size=3, pipelines=1) == (
        "micro batches of 3 do not divide the global batch of 64"
    )
    assert even_counts(job, size=16, pipelines=5) == (
        "4 micro batches of 16 do not feed 5 pipelines"
    )
    narrow = replace(job, micro_batches=(1, 3, 2))
    assert even_counts(narrow, size=4, pipelines=1) == (
        "micro batches of 4 are not among those that the job considers"
    )
    assert micro_batch_sizes(narrow) == (1, 2)
    assert micro_batch_sizes(replace(job, global_batch=6)) == (1, 2)


def test_degrees_and_states_follow_the_job():
    case = small_case(*MIXED, max_tp=4)
    assert tp_degrees(case, 8) == (1, 2, 4)
    assert tp_degrees(case, 3) == (1, 2)
    job = case.job
    assert state_bytes_per_parameter(job) == 16
    assert state_bytes_per_parameter(replace(job, precision="bf16", optimizer="sgd")) == 14


def test_single_bandwidth_is_the_slowest_pairs():
    wide = small_case(*MIXED)
    near = small_case(pool("A100-40", 8, per_machine=4))
    single = small_case(pool("A100-40", 4, per_machine=4))
    slow, fast, within = (
        fleet_bytes_per_s(case, fleets_of(case)[0]) for case in (wide, near, single)
    )
    assert slow < fast < within


def test_ties_go_to_fewer_gpus_then_to_the_smaller_text():
    plans = [Plan(size, (Pipeline(1, ()),)) for size in (2, 1, 3, 4)]
    given = [
        (8, proposal(1.0, plans[0])),
        (8, proposal(1.0, plans[1])),
        (4, proposal(1.0, plans[2])),
        (1, proposal(2.0, "too odd")),
        (9, proposal(0.5, plans[3])),
    ]
    wanted = [(0.5, 4), (1.0, 3), (1.0, 1), (1.0, 2), (2.0, None)]
    for order in (given, given[::-1]):
        found = ranked(order)
        assert [(p.seconds, p.plan and p.plan.micro_batch_size) for p in found] == wanted
    assert ranked(given)[-1].why_not == "too odd"
