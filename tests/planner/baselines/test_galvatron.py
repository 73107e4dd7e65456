"""Galvatron's layer costs, its knapsack and its search, by hand and against golden results."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from planner.baselines.galvatron.planner import (
    GalvatronInputs,
    GalvatronPlan,
    GalvatronPlanner,
    Memory,
    Strategy,
    choose,
    inputs_from,
    layer_mb,
    layer_seconds,
    other_mb,
    pipeline_seconds,
    search,
    strategies,
    switch_seconds,
    to_plan,
)
from planner.baselines.shared.equal_gpus import fleets_of
from simulator.inputs.plan_check import check_plan
from tests.planner.baselines.golden_inputs import load_golden
from tests.planner.baselines.small_case import checked_plans, pool, small_case

TWO_KINDS = (pool("A100-40", 8, per_machine=4), pool("V100-16", 6, per_machine=4))

HAND = GalvatronInputs(
    layers=4,
    forward_ms=1.0,
    parameter_mb=10.0,
    activation_mb={1: 4.0, 2: 2.0, 4: 1.0},
    sequence=1024,
    hidden=64,  # One MB per sample in each TP all-reduce round of 16 bytes.
    whole=Memory(30.0, 2.0),
    first=Memory(10.0, 1.0),
    last=Memory(20.0, 1.0),
    all_reduce_gb_per_s={
        (n, near): 10.0 if near else 1.0 for n in (1, 2, 4, 8) for near in (False, True)
    },
    batch=8,
    devices=4,
    memory_mb=10_000,
    overlap_slowdown=1.5,
    states_per_parameter=4.0,
    context_mb=100.0,
)


def test_data_parallel_sums_hide_behind_the_backward_pass():
    # Forward 2 ms, backward 4 ms; 2 x 3/4 x 10 MB at 10 GB/s: 1.5 ms, each 1.5 times slower.
    assert layer_seconds(HAND, Strategy(1, 4), 8) == pytest.approx((2 + 1.5 * 1.5 + 2.5) / 1e3)
    assert layer_seconds(HAND, Strategy(1, 4), 8, sync=False) == pytest.approx(6e-3)


def test_gradient_sums_longer_than_the_backward_pass_add_time():
    slow = replace(HAND, parameter_mb=100.0)  # 15 ms of sums against 4 ms of backward.
    assert layer_seconds(slow, Strategy(1, 4), 8) == pytest.approx((2 + 4 * 1.5 + 11) / 1e3)


def test_wide_tp_hides_sums_behind_half_of_the_backward_pass_only():
    # Forward 8/2/2 = 2 ms; TP sends 2 x 1/2 x 4 samples = 4 MB, sums 2 x 1/2 x 10/2 = 5 MB.
    near, far = Strategy(2, 2), Strategy(2, 2, consecutive=False)
    assert layer_seconds(HAND, near, 8) == pytest.approx((2 + 2 + 2 * 1.5 + 3 + 0.4) / 1e3)
    assert layer_seconds(HAND, far, 8) == pytest.approx((2 + 2 + 0.5 * 1.5 + 1.5 + 4.0) / 1e3)


def test_memory_holds_the_samples_in_flight():
    # States 4 x 10 / 2; 8 / 1 samples, of which the first of two stages holds 2 of 4 chunks.
    assert layer_mb(HAND, Strategy(2, 1), stage=0, stages=2, chunks=4) == 20 + 2.0 * 8 / 2
    assert layer_mb(HAND, Strategy(2, 1), stage=1, stages=2, chunks=4) == 20 + 2.0 * 8 / 4
    assert other_mb(HAND, stage=0, stages=1, chunks=2) == 30 + 2.0 * 2 / 2 + 100
    assert [other_mb(HAND, stage=s, stages=4, chunks=8) for s in range(4)] == [114, 100, 100, 121]


def test_a_switch_costs_where_a_layers_input_must_be_gathered():
    near, far, none = Strategy(2, 2), Strategy(2, 2, consecutive=False), Strategy(1, 4)
    assert switch_seconds(HAND, near, near, 8) == 0
    assert switch_seconds(HAND, near, none, 8) == 0
    assert switch_seconds(HAND, none, near, 8) == pytest.approx(1 / 2 * 2 * 8 / 2 / 10 * 1e-3)
    assert switch_seconds(HAND, near, far, 8) == pytest.approx(1 / 2 * 2 * 8 / 2 / 1 * 1e-3)


def test_the_knapsack_is_optimal():
    rng = random.Random(5)
    refused = 0
    for _ in range(60):
        layers, count = rng.randint(1, 4), rng.randint(1, 3)
        mb = [[rng.randint(0, 6) for _ in range(count)] for _ in range(layers)]
        intra = [[rng.randint(1, 9) for _ in range(count)] for _ in range(layers)]
        inter = [[rng.randint(0, 4) for _ in range(count)] for _ in range(count)]
        memory = rng.randint(0, 16)
        costs = [
            sum(intra[i][s] for i, s in enumerate(chosen))
            + sum(inter[a][b] for a, b in itertools.pairwise(chosen))
            for chosen in itertools.product(range(count), repeat=layers)
            if sum(mb[i][s] for i, s in enumerate(chosen)) <= memory
        ]
        found = choose(memory, mb, intra, inter)
        if not costs:
            assert found is None
            refused += 1
            continue
        assert found is not None
        cost, chosen, left = found
        assert cost == min(costs)
        assert left == memory - sum(mb[i][s] for i, s in enumerate(chosen))
    assert 0 < refused < 60


def test_one_depth_takes_a_chunk_count_down_only_as_published():
    # 8 samples in one chunk are 2 each at depth 1, and too many (8) at depth 4.
    assert [plan.chunks for plan in search(HAND)] != [
        plan.chunks for plan in search(HAND, mode="published")
    ]
    assert {plan.chunks for plan in search(HAND)} == {1, 2, 4, 8}
    assert {plan.chunks for plan in search(HAND, mode="published")} == {2, 4, 8}


def test_a_large_memory_is_not_used_in_full():
    # One device, one chunk of one sample: 4 layers of 40 + 4 MB and 30 + 2 + 100 MB beside them.
    tight = replace(HAND, batch=1, devices=1, parameter_mb=5_000.0, memory_mb=80_148)
    assert search(tight) == []
    assert len(search(replace(tight, memory_mb=100_185))) == 1


def test_stages_of_other_degrees_become_split_stages():
    case = small_case(*TWO_KINDS)
    fleet = fleets_of(case)[0]
    own = GalvatronPlan(1.0, 16, (12, 12), (Strategy(4, 1),) * 12 + (Strategy(1, 4),) * 12)
    plan = to_plan(own, case.job, fleet)
    assert not isinstance(plan, str)
    (pipeline,) = plan.pipelines
    assert (plan.micro_batch_size, pipeline.micro_batches) == (4, 16)
    assert [(s.layers, s.tp, s.split) for s in pipeline.stages] == [
        ((0, 13), 4, (1,)),
        ((13, 26), 1, (1, 1, 1, 1)),
    ]
    assert check_plan(plan, case.job, case.cluster) == ()
    published = to_plan(own, case.job, fleet, mode="published")
    assert not isinstance(published, str)
    assert [s.tp for s in published.pipelines[0].stages] == [4, 4]


def test_layers_that_differ_within_a_stage_cannot_be_expressed():
    case = small_case(*TWO_KINDS)
    own = GalvatronPlan(1.0, 16, (24,), (Strategy(4, 2),) * 12 + (Strategy(2, 4),) * 12)
    reason = to_plan(own, case.job, fleets_of(case)[0])
    assert reason == "the layers of stage 0 differ in their TP degree"


def test_micro_batches_must_divide_among_the_replicas():
    case = small_case(*TWO_KINDS)
    fleet = fleets_of(case)[0]
    own = GalvatronPlan(1.0, 16, (12, 12), (Strategy(1, 4),) * 12 + (Strategy(4, 1),) * 12)
    assert not isinstance(to_plan(own, case.job, fleet), str)
    reason = to_plan(replace(own, chunks=32), case.job, fleet)
    assert reason == "its micro batches of 2 samples do not divide among the replicas"
    reason = to_plan(replace(own, chunks=3), case.job, fleet)
    assert reason == "3 micro batches do not divide the global batch of 64"


@pytest.mark.parametrize("mode", ["fixed", "published"])
def test_proposals_of_a_real_case_are_valid_and_sorted(mode):
    case = small_case(*TWO_KINDS)
    proposals = GalvatronPlanner().proposals(case, mode)
    used = [plan.gpus_used() for plan in checked_plans(case, proposals)]
    assert {"A100-40@us-central1-a": 8} in used
    assert {"V100-16@us-central1-a": 4} in used
    assert GalvatronPlanner().proposals(case, mode) == proposals


def test_inputs_of_a_fleet_tell_machines_from_the_network():
    case = small_case(*TWO_KINDS)
    table = inputs_from(case, fleets_of(case)[0]).all_reduce_gb_per_s
    assert table[4, True] > table[8, True] == table[2, False]


# Golden results ---------------------------------------------------------------------------------


def golden_inputs(reference) -> GalvatronInputs:
    given = load_golden(reference, "galvatron")["inputs"]

    def other(key: str) -> Memory:
        memory = given[f"other_memory_{key}"]
        return Memory(memory["model_states"], memory["activation"])

    table = {(1, near): 1.0 for near in (False, True)}
    for key, bandwidth in given["allreduce_GB_s"].items():
        ranks, _, near = key.split("_")
        table[int(ranks), near == "1"] = bandwidth
    return GalvatronInputs(
        layers=given["layernum"],
        forward_ms=given["forward_ms_per_sample_per_layer"],
        parameter_mb=given["parameter_size_mb"],
        activation_mb={int(t): mb for t, mb in given["activation_mb_per_sample(tp)"].items()},
        sequence=given["seq"],
        hidden=given["hidden"],
        whole=other("pp_off"),
        first=other("pp_on_first"),
        last=other("pp_on_last"),
        all_reduce_gb_per_s=table,
        batch=given["gbs"],
        devices=given["gpus"],
        memory_mb=40960,
        tp_max=given["max_tp_deg"],
        overlap_slowdown=given["overlap_coe"],
        states_per_parameter=1.0,  # As in the published comparison.
    )


def golden_strategy(raw) -> tuple[int, Strategy]:
    p, t, d, more = raw
    return p, Strategy(t, d, bool(more.get("tp", 1)))


def test_golden_strategies(reference):
    inputs = golden_inputs(reference)
    given = load_golden(reference, "galvatron")["inputs"]["strategies[pp,tp,dp,info]"]
    depths = (1, 2, 4, 8)
    assert [golden_strategy(raw) for raw in given] == [
        (p, strategy) for p in depths for strategy in strategies(inputs, p)
    ]


def test_golden_layer_times_and_memory(reference):
    inputs = golden_inputs(reference)
    units = load_golden(reference, "galvatron")["cost_units"]
    for unit in units:
        p, strategy = golden_strategy(unit["strategy"])
        if "batch" in unit:
            time = layer_seconds(inputs, strategy, unit["batch"])
            alone = layer_seconds(inputs, strategy, unit["batch"], sync=False)
            assert time == pytest.approx(unit["layer_time"], rel=1e-9), unit
            assert alone == pytest.approx(unit["layer_time_no_dp_comm"], rel=1e-9), unit
        else:
            chunks = inputs.batch * p // inputs.devices // unit["mbsz"]
            at = {"stages": p, "chunks": chunks}
            memory = layer_mb(inputs, strategy, stage=unit["stage"], **at)
            others = [other_mb(inputs, stage=s, **at) for s in range(p)]
            assert memory == pytest.approx(unit["layer_mem_mb"], rel=1e-9), unit
            assert others == pytest.approx(unit["other_mb"], rel=1e-9), unit
    assert len(units) > 90


def test_golden_pipeline_times(reference):
    inputs = golden_inputs(reference)
    units = load_golden(reference, "galvatron")["pipeline_cost_units"]
    for unit in units:
        p, strategy = golden_strategy(unit["strategy(all layers)"])
        each = inputs.layers // p
        division = [each] * (p - 1) + [inputs.layers - each * (p - 1)]
        seconds = pipeline_seconds(
            inputs, [strategy] * inputs.layers, division=division, chunks=unit["chunks"]
        )
        assert seconds == pytest.approx(unit["iter_time"], rel=1e-9), unit
    assert len(units) == 46


def test_golden_knapsacks(reference):
    units = load_golden(reference, "galvatron")["dp_core_units"]
    inter = [[0.3 * abs(a - b) for b in range(3)] for a in range(3)]
    for unit in units:
        found = choose(unit["max_mem"], unit["mem_per_layer_and_strategy"], unit["intra"], inter)
        wanted = unit["result"]
        if wanted["total_cost"] is None:
            assert found is None
            continue
        assert found is not None
        assert found[0] == pytest.approx(wanted["total_cost"], rel=1e-9)
        assert found[1:] == (tuple(wanted["strategy_per_layer"]), wanted["memory_left"])
    assert len(units) == 6


@pytest.mark.parametrize("mode", ["fixed", "published"])
def test_golden_searches(reference, mode):
    raw = load_golden(reference, "galvatron")
    (key,) = (k for k in raw if k.startswith("search_fixed" if mode == "fixed" else "search_as"))
    for name, wanted in raw[key].items():
        memory = int(name.removeprefix("mem_").removesuffix("MB"))
        plans = search(replace(golden_inputs(reference), memory_mb=memory), mode=mode)
        assert [
            (
                len(plan.division),
                [s.t for s in plan.strategies],
                [s.d for s in plan.strategies],
                plan.chunks,
                ",".join(map(str, plan.division)),
            )
            for plan in plans
        ] == [
            (w["pp"], w["tp_per_layer"], w["dp_per_layer"], w["chunks"], w["division"])
            for w in wanted
        ], name
        assert [plan.seconds for plan in plans] == pytest.approx(
            [w["iter_time(=1/throughput)"] for w in wanted], rel=1e-9
        )
