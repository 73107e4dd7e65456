"""Piper's cost, its choice of variants and its search, by hand and against golden results."""

from __future__ import annotations

import itertools
import math

import pytest

from planner.baselines.piper.planner import (
    PiperInputs,
    PiperPlan,
    PiperPlanner,
    PiperStage,
    Variant,
    choose_variants,
    in_flight,
    inputs_from,
    plan_seconds,
    search,
    stage_bytes,
    stage_seconds,
    to_plan,
)
from planner.baselines.shared.equal_gpus import fleets_of
from simulator.inputs.plan_check import check_plan
from tests.planner.baselines.golden_inputs import load_golden, load_toy
from tests.planner.baselines.small_case import checked_plans, gpus_of, pool, small_case

TWO_KINDS = (pool("A100-40", 8, per_machine=4), pool("V100-16", 6, per_machine=4))


def chain(
    *seconds: float, devices: int, micro_batches: int, kept: float = 0.0, memory: float = 1.0
) -> PiperInputs:
    """Layers without parameters that send a byte each over a link of a byte per second."""
    layers = tuple({1: (Variant(s, 0.0, kept, 0.0),)} for s in seconds)
    return PiperInputs(layers, (1.0,) * (len(seconds) - 1), 1.0, devices, micro_batches, memory)


def test_a_stage_pays_for_work_both_cuts_and_a_parameter_server():
    layers = tuple({1: (Variant(seconds, 6.0, 0.0, 0.0),)} for seconds in (1.0, 2.0, 3.0))
    inputs = PiperInputs(layers, (10.0, 20.0), 2.0, 4, 4, 1.0)
    middle = PiperStage(1, 1, 2, 1, (0,))
    # 2 / 2 of work, 2 (10 + 20) / (2 x 2) of cuts, 4 (2 - 1) 6 / (2 x 4 x 2) of gradients.
    assert stage_seconds(inputs, middle) == 1.0 + 15.0 + 1.5
    assert stage_seconds(inputs, PiperStage(0, 2, 1, 1, (0, 0, 0))) == 6.0


def test_earlier_stages_hold_more_samples():
    stages = [
        PiperStage(0, 0, 1, 1, (0,)),
        PiperStage(1, 1, 2, 1, (0,)),
        PiperStage(2, 2, 2, 1, (0,)),
    ]
    assert [in_flight(stages, i) for i in range(3)] == [5, 2, 1]


@pytest.mark.parametrize(
    ("memory", "chosen"), [(30, (0, 0, 0)), (29, (0, 1, 0)), (20, (1, 1, 0)), (11, None)]
)
def test_swaps_go_by_time_per_byte_and_may_overshoot(memory, chosen):
    def layer(extra: float) -> tuple[Variant, Variant]:
        return Variant(1.0, 0.0, 10.0, 0.0), Variant(1.0 + extra, 0.0, 1.0, 0.0)

    layers = [layer(2.0), layer(1.0), (Variant(1.0, 0.0, 10.0, 0.0),)]
    assert choose_variants(layers, in_flight=1, memory_bytes=memory) == chosen


def test_an_unused_device_stays_unused():
    # Each cut costs more than it saves, and a second replica is free: two devices of three.
    (best,) = search(chain(1.0, 1.0, devices=3, micro_batches=2), mode="published")
    assert best == PiperPlan(1.0, (PiperStage(0, 1, 2, 1, (0, 0)),))


def test_each_point_of_the_frontier_has_its_plan():
    plans = search(chain(1.0, 1.0, devices=3, micro_batches=2))
    assert [(p.seconds_per_sample, p.devices) for p in plans] == [(1.0, 2), (2.0, 1)]


def test_a_memory_limit_forces_a_cut():
    inputs = chain(1.0, 1.0, devices=2, micro_batches=2, kept=1.0, memory=2.0)
    (best,) = search(inputs, mode="published")
    # One stage of two replicas would hold two samples' worth of layers: 2, which still fits.
    assert len(best.stages) == 1
    inputs = chain(1.0, 1.0, 1.0, devices=2, micro_batches=2, kept=1.0, memory=2.0)
    (best,) = search(inputs, mode="published")
    assert [(s.first, s.last) for s in best.stages] == [(0, 0), (1, 2)]
    assert search(chain(1.0, devices=1, micro_batches=1, kept=2.0, memory=1.0)) == []


def test_no_cut_of_a_small_chain_is_better_than_the_search():
    seconds = (1.0, 4.0, 2.0, 2.0, 0.5, 3.0)
    inputs = chain(*seconds, devices=5, micro_batches=6, kept=1.0, memory=5.0)
    best = math.inf
    for cuts in itertools.product((0, 1), repeat=len(seconds) - 1):
        ends = [i for i, cut in enumerate(cuts) if cut] + [len(seconds) - 1]
        firsts = [0, *(end + 1 for end in ends[:-1])]
        for degrees in itertools.product((1, 2, 3), repeat=len(ends)):
            if sum(degrees) > 5:
                continue
            stages = [
                PiperStage(first, last, d, 1, (0,) * (last - first + 1))
                for first, last, d in zip(firsts, ends, degrees, strict=True)
            ]
            fits = all(
                stage_bytes(inputs, stage, in_flight=in_flight(stages, i)) <= 5.0
                for i, stage in enumerate(stages)
            )
            if fits:
                best = min(best, plan_seconds(inputs, stages))
    assert math.isfinite(best)
    assert search(inputs)[0].seconds_per_sample == best


def test_unequal_degrees_become_split_stages():
    case = small_case(*TWO_KINDS)
    fleet = fleets_of(case)[0]
    inputs = inputs_from(case, fleet, micro_batch_size=1)
    own = PiperPlan(1.0, (PiperStage(0, 9, 2, 1, (0,) * 10), PiperStage(10, 25, 4, 1, (0,) * 16)))
    plan = to_plan(own, inputs, case.job, fleet, micro_batch_size=1)
    assert not isinstance(plan, str)
    assert plan.micro_batch_size == 2
    assert [p.micro_batches for p in plan.pipelines] == [16, 16]
    assert [stage.split for stage in plan.pipelines[0].stages] == [(1,), (1, 1)]
    assert check_plan(plan, case.job, case.cluster) == ()


def test_a_partly_recomputed_stage_cannot_be_expressed():
    case = small_case(*TWO_KINDS, recompute="auto")
    fleet = fleets_of(case)[0]
    inputs = inputs_from(case, fleet, micro_batch_size=1)
    own = PiperPlan(1.0, (PiperStage(0, 25, 1, 1, (0, 1) + (0,) * 24),))
    reason = to_plan(own, inputs, case.job, fleet, micro_batch_size=1)
    assert reason == "recomputes 1 of the layers 0 to 25 only"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fixed", "published"])
def test_proposals_of_a_real_case_are_valid_and_sorted(mode):
    case = small_case(*TWO_KINDS, recompute="auto")
    proposals = PiperPlanner().proposals(case, mode)
    assert len(proposals) == 2 if mode == "published" else len(proposals) > 10
    kinds = gpus_of(checked_plans(case, proposals))
    assert kinds == {"A100-40@us-central1-a", "V100-16@us-central1-a"}
    assert PiperPlanner().proposals(case, mode) == proposals


# Golden results ---------------------------------------------------------------------------------


def golden_inputs(reference, case) -> PiperInputs:
    toy, given = load_toy(reference), case["inputs"]
    parameters, kept, sent = toy.parameters(), toy.kept_bytes(), toy.output_floats()

    def variants(layer: int, t: int) -> tuple[Variant, ...]:
        ahead = toy.forward_ms("A100-40", tp=t, samples=1)[layer] / 1e3
        back = toy.backward_ms("A100-40", tp=t, samples=1)[layer] / 1e3
        weights = 4.0 * parameters[layer] / t
        plain = Variant(ahead + back, weights, kept[layer] / t, 4 * weights)
        again = Variant(2 * ahead + back, weights, 4 * sent[layer], 4 * weights)
        return (plain, again) if given["recompute_variants"] else (plain,)

    widths = (1, 2, 4) if given["tensor_parallel"] else (1,)
    count = len(toy.kinds)
    return PiperInputs(
        layers=tuple({t: variants(i, t) for t in widths} for i in range(count)),
        edge_bytes=tuple(4 * floats for floats in sent[:-1]),
        bandwidth_bytes_per_s=1e10,
        devices=8,
        micro_batches=32,
        memory_bytes=given["max_memory_bytes"],
    )


def test_golden_costs_of_given_plans(reference):
    given = 0
    for case in load_golden(reference, "piper")["cases"].values():
        inputs = golden_inputs(reference, case)
        for entry in case["given_plans"]:
            stages = [
                PiperStage(first, last, d, t, (int(variant != "vanilla"),) * (last - first + 1))
                for first, last, d, t, variant in entry["plan"]
            ]
            wanted = pytest.approx(entry["time_per_sample_s"], rel=1e-9)
            assert plan_seconds(inputs, stages) == wanted
            given += 1
    assert given == 6


@pytest.mark.parametrize("mode", ["fixed", "published"])
def test_golden_optima(reference, mode):
    for name, case in load_golden(reference, "piper")["cases"].items():
        inputs = golden_inputs(reference, case)
        plans = search(inputs, mode=mode)
        if case["search"] is None:
            assert plans == [], name
            continue
        best = plans[0]
        wanted = case["search"]["time_per_sample_s"]
        assert best.seconds_per_sample == pytest.approx(wanted, rel=1e-9), name
        assert plan_seconds(inputs, best.stages) == pytest.approx(wanted, rel=1e-9), name
        swapped = sum(sum(stage.variants) for stage in best.stages)
        assert swapped == sum(stage["n_recompute"] for stage in case["search"]["stages"]), name
