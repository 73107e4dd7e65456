"""Varuna against golden simulations and searches, by hand, and on a small real case."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from planner.baselines.shared.equal_nodes import Degrees
from planner.baselines.varuna import pipeline as varuna_pipeline
from planner.baselines.varuna.pipeline import VarunaTimes, own_orders, simulate_us, turns
from planner.baselines.varuna.planner import (
    VarunaInputs,
    VarunaPlanner,
    depths,
    pipeline_of,
    search,
    stage_bytes_max,
)
from simulator.inputs.plan_check import check_plan
from tests.planner.baselines.golden_inputs import Toy, load_golden, load_toy
from tests.planner.baselines.small_case import checked_plans, gpus_of, pool, small_case

MODES = ("fixed", "published")
SIZES = (1, 2, 4, 8)
EVEN = VarunaTimes((1.0,) * 3, (2.0,) * 3, 4, 0.0, 0.0, 4, 0.0)


def golden_inputs(toy: Toy, memory_bytes: float) -> VarunaInputs:
    gpu = "A100-40"
    return VarunaInputs(
        gpus=8,
        gpus_per_node=4,
        global_batch=32,
        memory_bytes=memory_bytes,
        between_bytes_per_s=1e10,
        within_bytes_per_s=math.inf,
        forward_us={b: [1e3 * t for t in toy.forward_ms(gpu, tp=1, samples=b)] for b in SIZES},
        backward_us={b: [1e3 * t for t in toy.backward_ms(gpu, tp=1, samples=b)] for b in SIZES},
        held_bytes={
            b: [
                16 * p + k for p, k in zip(toy.parameters(), toy.kept_bytes(samples=b), strict=True)
            ]
            for b in SIZES
        },
        output_bytes={b: [4 * b * floats for floats in toy.output_floats()] for b in SIZES},
        gradient_bytes=[4 * count for count in toy.parameters()],
    )


def golden_pipeline(case: dict[str, Any]) -> VarunaTimes:
    return VarunaTimes(
        tuple(case["fwd_us"]),
        tuple(case["bwd_us"]),
        case["microbatches"],
        case["send_same_node_us"],
        case["send_cross_node_us"],
        case["gpus_per_node"],
        case["allreduce_us"],
    )


def test_golden_simulations(reference):
    for case in load_golden(reference, "varuna")["simulator_cases"]:
        pipeline = golden_pipeline(case)
        assert simulate_us(pipeline, "fixed") == pytest.approx(case["fixed_us"], abs=2)
        # The public program reports a deadlock as 0.
        published = simulate_us(pipeline, "published") or 0.0
        assert published == pytest.approx(case["as_published_us"], abs=2)


@pytest.mark.parametrize("mode", MODES)
def test_golden_simulations_of_its_own_schedule(reference, mode):
    for case in load_golden(reference, "varuna")["recompute_schedule_cases"]:
        pipeline = replace(golden_pipeline(case), recomputes=True)
        wanted = case["varuna_recompute_schedule_us"]
        assert simulate_us(pipeline, mode) == pytest.approx(wanted, abs=2)


@pytest.mark.parametrize("mode", MODES)
def test_golden_searches(reference, mode):
    toy = load_toy(reference)
    key = {"fixed": "sim_fixed_us", "published": "sim_as_published_us"}[mode]
    best = {"fixed": "best_fixed", "published": "best_as_published_sim"}[mode]
    for name, case in load_golden(reference, "varuna")["search_cases"].items():
        gib = float(name.removeprefix("mem_").removesuffix("GiB"))
        inputs = golden_inputs(toy, gib * 2**30)
        wanted = {row["pp"]: row for row in case["rows"] if row["mbs"] is not None}
        found = {depth.pp: depth for depth in depths(inputs)}
        assert found.keys() == wanted.keys()
        times = {depth.pp: us for us, depth in search(inputs, mode)}
        assert next(iter(times)) == case[best]
        for pp, row in wanted.items():
            depth = found[pp]
            assert (depth.dp, depth.micro_batch_size) == (row["dp"], row["mbs"])
            held = stage_bytes_max(inputs, pp, row["mbs"])
            assert held == pytest.approx(row["max_stage_mem_bytes"], rel=1e-9)
            pipeline = pipeline_of(inputs, depth)
            assert pipeline.forward_us == pytest.approx(row["fwd_us"], rel=1e-9)
            assert pipeline.micro_batches == row["microbatches"]
            assert pipeline.long_send_us == row["send_cross_node_us"]
            assert pipeline.all_reduce_us == row["allreduce_us"]
            assert times[pp] == pytest.approx(row[key], abs=2)


def test_a_stage_warms_up_then_takes_turns_then_drains():
    words = ["".join(kind for kind, _ in turns(EVEN, stage, "fixed")) for stage in range(3)]
    assert words == ["FFFBFBBB", "FFBFBFBB", "FBFBFBFB"]
    short = replace(EVEN, micro_batches=1)
    assert turns(short, 0, "fixed") == [("F", 0), ("B", 0)]
    assert turns(short, 0, "published") == [("F", 0)]
    assert turns(short, 1, "published") == [("F", 0), ("B", 0)]


def test_a_pipeline_by_hand():
    # Fill 2 x 1, then the last stage's 4 x 3, then two gradients back.
    assert simulate_us(EVEN) == 2 + 12 + 4
    assert simulate_us(replace(EVEN, all_reduce_us=5.0)) == 18 + 5
    # A single micro batch pays every send, there and back.
    one = replace(EVEN, micro_batches=1, send_us=0.5)
    assert simulate_us(one) == 9 + 4 * 0.5
    # Stages 0 and 1 share a node, stage 2 stands on the next.
    assert simulate_us(replace(one, gpus_per_node=2, long_send_us=3.0)) == 9 + 2 * 0.5 + 2 * 3
    assert simulate_us(replace(one, gpus_per_node=2)) == 9 + 4 * 0.5
    # Of four stages only the two in the middle stand apart.
    four = replace(one, forward_us=(1.0,) * 4, backward_us=(2.0,) * 4, long_send_us=3.0)
    assert simulate_us(replace(four, gpus_per_node=2)) == 12 + 4 * 0.5 + 2 * 3


def test_its_own_schedule_recomputes_right_before_backward():
    orders = own_orders(replace(EVEN, micro_batches=2))
    words = ["".join(f"{kind}{m}" for kind, m in order) for order in orders]
    assert words == ["F0F1R0B0R1B1", "F0F1R0B0R1B1", "F0B0F1B1"]
    for stages in range(2, 7):
        for order in own_orders(replace(EVEN, forward_us=(1.0,) * stages, micro_batches=9))[:-1]:
            for (kind, m), after in pairwise(order):
                assert kind != "R" or after == ("B", m)
    # Two forwards to fill, the last stage's two turns, then R and B on two stages: the gradient
    # of the second micro batch finds them idle.
    assert simulate_us(replace(EVEN, micro_batches=2, recomputes=True)) == 2 + 6 + 2 * 3


def test_a_stage_that_waits_for_a_gradient_takes_a_forward_first():
    # The first gradient is there at 1 + 10 + 1 + 2 + 10 = 24, and the last forward must not wait
    # for it as planned: then all gradients come one behind the other, 3 apart.
    far = VarunaTimes((1.0, 1.0), (2.0, 2.0), 4, 10.0, 0.0, 4, 0.0, recomputes=True)
    assert [kind for kind, _ in own_orders(far)[0]].index("R") < 4
    assert simulate_us(far) == 24 + 4 * 3


def test_two_waiting_gradients_deadlock_the_published_simulation_alone():
    slow_first = replace(EVEN, forward_us=(9.0, 1.0, 1.0), backward_us=(18.0, 2.0, 2.0))
    assert simulate_us(slow_first, "published") is None
    assert simulate_us(slow_first, "fixed") == 4 * 27


def small_inputs(**changes: object) -> VarunaInputs:
    inputs = VarunaInputs(
        gpus=4,
        gpus_per_node=2,
        global_batch=8,
        memory_bytes=100.0,
        between_bytes_per_s=10.0,
        within_bytes_per_s=20.0,
        forward_us={1: (1.0,) * 4, 2: (1.5,) * 4},
        backward_us={1: (2.0,) * 4, 2: (3.0,) * 4},
        held_bytes={1: (30.0,) * 4, 2: (40.0,) * 4},
        output_bytes={1: (5.0,) * 4, 2: (10.0,) * 4},
        gradient_bytes=(8.0,) * 4,
    )
    return replace(inputs, **changes)  # type: ignore[arg-type] - any field may change


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_huge_batch_is_extrapolated_from_its_first_part(monkeypatch, recomputes):
    pipeline = VarunaTimes((3.0, 5.0, 2.0), (6.0, 9.0, 7.0), 400, 1.0, 4.0, 2, 10.0, recomputes)
    counts = (400, 401, 1000)
    one_by_one = [simulate_us(replace(pipeline, micro_batches=count)) for count in counts]
    monkeypatch.setattr(varuna_pipeline, "MICRO_BATCHES_MAX", 100)
    told = [simulate_us(replace(pipeline, micro_batches=count)) for count in counts]
    # A rhythm may be longer than one micro batch.
    assert told == pytest.approx(one_by_one, rel=1e-2)
    assert simulate_us(replace(pipeline, micro_batches=10**12)) > 1e12


def test_memory_frees_all_outputs_but_the_last():
    assert stage_bytes_max(small_inputs(), 2, 1) == 2 * 30 - 5
    assert stage_bytes_max(small_inputs(), 1, 2) == 4 * 40 - 3 * 10


def test_the_largest_micro_batch_that_fits_is_used_and_depths_where_none_fits_are_dropped():
    # One stage holds at least 4 * 30 - 3 * 5 = 105.
    assert depths(small_inputs()) == [Degrees(1, 2, 2, 2), Degrees(1, 1, 4, 2)]
    assert depths(small_inputs(memory_bytes=69.0)) == [Degrees(1, 2, 2, 1), Degrees(1, 1, 4, 2)]
    assert depths(small_inputs(gpus=3)) == [Degrees(1, 1, 2, 2)]  # One GPU stays idle.
    assert depths(small_inputs(memory_bytes=1.0)) == []


def test_messages_and_the_all_reduce_of_a_plan():
    pipeline = pipeline_of(small_inputs(), Degrees(1, 2, 2, 1))
    assert pipeline.send_us == 5 / 20 * 1e6
    assert pipeline.long_send_us == 5 / 10 * 1e6
    assert pipeline.all_reduce_us == 2 * 1 / 2 * 16 / 10 * 1e6
    assert pipeline.micro_batches == 4
    assert pipeline_of(small_inputs(global_batch=7), Degrees(1, 2, 2, 2)).micro_batches == 2


@pytest.mark.parametrize("mode", MODES)
def test_plans_of_a_real_case(mode):
    case = small_case(
        pool("A100-40", 8, per_machine=4), pool("V100-16", 4, per_machine=4, zone="us-east1-b")
    )
    found = VarunaPlanner().proposals(case, mode)
    plans = checked_plans(case, found)
    assert len(plans) == len(found)
    assert gpus_of(plans) == {"A100-40@us-central1-a", "V100-16@us-east1-b"}
    assert list(VarunaPlanner().proposals(small_case(), mode)) == []


def test_a_job_that_allows_recomputation_gets_it():
    case = small_case(pool("A100-40", 8, per_machine=4), recompute="auto")
    found = VarunaPlanner().proposals(case, "fixed")
    assert found
    for one in found:
        assert one.plan is not None
        assert {s.recompute for p in one.plan.pipelines for s in p.stages} == {"full"}
        assert check_plan(one.plan, case.job, case.cluster) == ()


def test_the_stages_of_a_pipeline_are_adjacent():
    zones = ("us-central1-a", "us-east1-b")
    case = small_case(*(pool("A100-40", 2, per_machine=2, zone=zone) for zone in zones))
    plans = [one.plan for one in VarunaPlanner().proposals(case, "fixed")]
    deep = next(plan for plan in plans if plan and len(plan.pipelines) == 2)
    for pipeline in deep.pipelines:
        assert len({stage.place.zone for stage in pipeline.stages}) == 1


def test_a_batch_too_small_for_all_replicas_is_a_reason():
    case = small_case(pool("A100-40", 8, per_machine=4), global_batch=8)
    found = VarunaPlanner().proposals(case, "fixed")
    reasons = [one.why_not for one in found if one.plan is None]
    assert reasons
    assert all("do not feed" in reason for reason in reasons)
