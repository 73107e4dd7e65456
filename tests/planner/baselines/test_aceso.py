"""Aceso's costs, actions and search, by hand and against golden results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.baselines.aceso.actions import AcesoActions, bottleneck
from planner.baselines.aceso.adapter import inputs_from, to_plan
from planner.baselines.aceso.cost import (
    FIXED,
    PUBLISHED,
    AcesoConfig,
    AcesoInputs,
    AcesoModel,
    AcesoPlan,
    AcesoStage,
)
from planner.baselines.aceso.planner import (
    AcesoPlanner,
    AcesoSearch,
    action_groups,
    initial,
    search,
)
from planner.baselines.shared.equal_gpus import fleets_of
from simulator.inputs.plan_check import check_plan
from tests.planner.baselines.golden_inputs import load_golden, load_toy
from tests.planner.baselines.small_case import checked_plans, gpus_of, pool, small_case

TWO_KINDS = (pool("A100-40", 8, per_machine=4), pool("V100-16", 4, per_machine=4))
NO_MESSAGES = {"within_mb_per_ms": float("inf"), "between_mb_per_ms": float("inf")}


def inputs_of(*ms: float, **changes) -> AcesoInputs:
    """Operators that take ``ms`` per sample, a third of it forward; tp halves them."""
    keys = [(b, t) for b in (1, 2, 4) for t in (1, 2)]

    def rows(value):
        return {key: (value(*key),) * len(ms) for key in keys}

    given = AcesoInputs(
        forward_ms={(b, t): tuple(x * b / t / 3 for x in ms) for b, t in keys},
        backward_ms={(b, t): tuple(x * b / t * 2 / 3 for x in ms) for b, t in keys},
        in_mb=rows(lambda b, _: 2.0 * b),
        out_mb=rows(lambda b, _: 2.0 * b),
        weights_mb=rows(lambda _, t: 6.0 / t),
        kept_mb=rows(lambda b, t: 4.0 * b / t),
        scratch_forward_mb=rows(lambda _b, _t: 1.0),
        scratch_backward_mb=rows(lambda _b, _t: 8.0),
        within_mb_per_ms=4.0,
        between_mb_per_ms=1.0,
        gpus=4,
        gpus_per_node=2,
        memory_mb=1000.0,
        batch=8,
        micro_batches=(1, 2, 4),
        tp_max=2,
    )
    return replace(given, **changes)


def config_of(micro_batch: int, *stages: tuple[int, int, int]) -> AcesoConfig:
    """Stages by their number of operators, tensor and data degree."""
    parts, first = [], 0
    for count, t, d in stages:
        parts.append(AcesoStage(first, first + count, t, d))
        first += count
    return AcesoConfig(micro_batch, tuple(parts))


def shape(config: AcesoConfig | None) -> list[tuple[int, int, int]] | None:
    return config and [(stage.end - stage.first, stage.t, stage.d) for stage in config.stages]


# Costs ------------------------------------------------------------------------------------------


def test_a_stage_pays_for_work_and_messages_in_every_step():
    inputs, config = inputs_of(3.0, 3.0, 6.0), config_of(2, (2, 2, 1), (1, 1, 2))
    judged = AcesoModel(inputs, PUBLISHED).judge(config)
    # Work of 6 x 2 / 2 and 6 ms; 4 MB come in at 4 MB/ms and leave between the nodes at 1; then
    # 2 MB per replica come and leave between nodes, the last although no stage follows.
    assert judged.step_ms == pytest.approx([6 + 1 + 4, 6 + 2 + 2])
    assert judged.times_ms == pytest.approx([11 * 3 + 21, 10 * 3 + 21])
    fixed = AcesoModel(inputs, FIXED).judge(config)
    # Two replicas of 6 MB sum their gradients within a node: 2 x 1/2 x 6 / 4.
    assert fixed.step_ms == pytest.approx([11, 8])
    assert fixed.times_ms == pytest.approx([11 * 3 + 19, 8 * 3 + 19 + 1.5])


def test_memory_counts_stages_behind_and_forgets_the_last_operators_scratch():
    model = AcesoModel(inputs_of(1.0, 1.0, 1.0))
    # Four copies of 12 MB, input and activations of 2 + 8 MB twice, and 12 MB for gradients in
    # transit rather than 9 of scratch; one operator alone has no scratch at all.
    assert model.memory_mb(AcesoStage(0, 2, 1, 1), 1, behind=1) == 4 * 12 + 2 * 10 + 12
    small = AcesoModel(inputs_of(1.0, 1.0, weights_mb={(1, 1): (1.0, 1.0)}))
    assert small.memory_mb(AcesoStage(0, 2, 1, 1), 1, behind=0) == 4 * 2 + 10 + 9
    assert small.memory_mb(AcesoStage(0, 1, 1, 1), 1, behind=0) == 4 * 1 + 6 + 1


def test_shares_of_ideal_and_lost_time():
    inputs = inputs_of(4.0, 4.0, **NO_MESSAGES)
    judged = AcesoModel(inputs).judge(config_of(2, (1, 1, 2), (1, 1, 2)))
    assert judged.ideal_ms == pytest.approx([4.0, 4.0])
    assert judged.loss_ms == pytest.approx([0.0, 0.0])
    slow = replace(inputs, forward_ms={**inputs.forward_ms, (1, 1): (3.0, 4 / 3)})
    judged = AcesoModel(slow).judge(config_of(2, (1, 1, 2), (1, 1, 2)))
    assert judged.loss_ms == pytest.approx([3.0 + 8 / 3 - 4.0, 0.0])


# Actions ----------------------------------------------------------------------------------------


def test_operators_move_to_the_stage_with_most_time_to_spare():
    model = AcesoModel(inputs_of(*[3.0] * 9, **NO_MESSAGES))
    start = config_of(1, (7, 1, 1), (1, 1, 1), (1, 1, 1))
    # The first stage sheds towards the nearer idle one, then on to the next until all are alike.
    assert shape(AcesoActions(model).apply("dec_op", start, 0)) == [(3, 1, 1)] * 3


def test_an_even_split_moves_no_layer():
    model = AcesoModel(inputs_of(*[3.0] * 4, **NO_MESSAGES))
    assert AcesoActions(model).apply("dec_op", config_of(1, (2, 1, 1), (2, 1, 1)), 0) is None


def test_a_stage_doubles_at_the_cost_of_the_least_busy():
    model = AcesoModel(inputs_of(*[3.0] * 6, gpus=4, gpus_per_node=4, **NO_MESSAGES))
    start = config_of(2, (4, 1, 1), (1, 1, 1), (1, 2, 1))
    # The third gives one of its two GPUs; the second has but one.
    assert shape(AcesoActions(model).apply("inc_tp", start, 0)) == [(4, 2, 1), (1, 1, 1), (1, 1, 1)]
    assert shape(AcesoActions(model).apply("inc_dp", start, 0)) == [(4, 1, 2), (1, 1, 1), (1, 1, 1)]
    assert AcesoActions(model).apply("dec_tp", start, 0) is None
    assert shape(AcesoActions(model).apply("dec_tp", start, 2)) == [(4, 1, 2), (1, 1, 1), (1, 1, 1)]


def test_no_stage_reaches_across_nodes():
    inputs = inputs_of(*[3.0] * 6, gpus=4, gpus_per_node=2, **NO_MESSAGES)
    start = config_of(2, (1, 1, 1), (1, 1, 1), (4, 2, 1))
    # The middle one would get GPUs of both nodes.
    assert AcesoActions(AcesoModel(inputs)).apply("inc_tp", start, 1) is None
    wide = AcesoActions(AcesoModel(replace(inputs, gpus_per_node=4)))
    assert shape(wide.apply("inc_tp", start, 1)) == [(1, 1, 1), (1, 2, 1), (4, 1, 1)]


def test_another_micro_batch_chooses_degrees_anew():
    # Two samples on two GPUs: tensor parallelism is half as efficient here as two replicas.
    inputs = inputs_of(*[3.0] * 2, **NO_MESSAGES)
    inputs = replace(inputs, forward_ms={k: (k[0] * 2.0,) * 2 for k in inputs.forward_ms})
    actions, start = AcesoActions(AcesoModel(inputs)), config_of(1, (1, 2, 1), (1, 2, 1))
    assert shape(actions.apply("inc_mbs", start, 0)) == [(1, 1, 2), (1, 1, 2)]
    assert actions.apply("dec_mbs", start, 0) is None


def test_action_groups_follow_the_bottleneck_resource():
    inputs = inputs_of(4.0, 1.0, **NO_MESSAGES)
    judged = AcesoModel(inputs).judge(config_of(2, (1, 1, 2), (1, 1, 2)))
    assert bottleneck(judged) == 0
    ideal_first = action_groups(judged, 0)
    assert ideal_first[0] == ["dec_op", "inc_dp", "inc_tp", "inc_mbs"]
    assert sorted(a for group in ideal_first for a in group) == sorted(
        ["dec_op", "inc_dp", "dec_dp", "inc_tp", "dec_tp", "inc_mbs", "dec_mbs"]
    )
    full = AcesoModel(replace(inputs, memory_mb=1.0)).judge(judged.config)
    assert action_groups(full, 0) == [["dec_op", "inc_dp", "inc_tp", "dec_mbs"]]


# Search -----------------------------------------------------------------------------------------


def test_only_fixed_starts_with_all_gpus():
    inputs = inputs_of(*[3.0] * 5)
    fixed, published = initial(inputs, 1), initial(inputs, 1, repairs=PUBLISHED)
    assert (shape(fixed), fixed.micro_batch) == ([(5, 2, 2)], 2)
    assert (shape(published), published.micro_batch) == ([(5, 2, 1)], 1)
    assert shape(initial(inputs, 2)) == [(2, 2, 1), (3, 2, 1)]
    assert initial(inputs, 5) is None  # There are four GPUs.


def test_a_search_balances_and_returns_only_what_fits():
    inputs = inputs_of(*[3.0] * 3, 9.0, **NO_MESSAGES, gpus=2)
    best = search(inputs, [2], repairs=PUBLISHED)[0]
    assert shape(best.config) == [(3, 1, 1), (1, 1, 1)]
    assert search(replace(inputs, memory_mb=1.0), [2]) == []


def test_a_search_gets_below_the_memory_limit():
    # Halves need 4 x 18 + 2 x 10 + 18 = 110 and 70; a front of one operator 72, and 104 behind.
    inputs = inputs_of(*[3.0] * 4, **NO_MESSAGES, gpus=2, memory_mb=105.0)
    heavy = replace(inputs, weights_mb=dict.fromkeys(inputs.weights_mb, (12.0, 6.0, 6.0, 6.0)))
    halves = AcesoModel(heavy).judge(config_of(1, (2, 1, 1), (2, 1, 1)))
    assert halves.memory_mb == [110, 70]
    assert not halves.fits
    (best,) = search(heavy, [2])
    assert shape(best.config) == [(1, 1, 1), (3, 1, 1)]


def test_the_number_of_configurations_can_be_limited():
    inputs = inputs_of(*[3.0] * 7, 9.0)
    model = AcesoModel(inputs)
    one = AcesoSearch(model, hops_max=3, trials_max=30, configurations_max=1)
    start = initial(inputs, 3)
    assert one.run(start) == start
    many = AcesoSearch(model, hops_max=3, trials_max=30)
    assert model.judge(many.run(start)).ms < model.judge(start).ms


def test_unequal_degrees_become_split_stages():
    case = small_case(*TWO_KINDS)
    fleet = fleets_of(case)[0]
    plan = to_plan(AcesoPlan(1.0, config_of(8, (10, 2, 2), (16, 1, 4))), case.job, fleet)
    assert not isinstance(plan, str)
    assert plan.micro_batch_size == 4
    assert [p.micro_batches for p in plan.pipelines] == [8, 8]
    assert [stage.split for stage in plan.pipelines[0].stages] == [(1,), (1, 1)]
    assert check_plan(plan, case.job, case.cluster) == ()


@pytest.mark.parametrize("mode", ["fixed", "published"])
def test_proposals_of_a_real_case_are_valid_and_sorted(mode):
    case = small_case(*TWO_KINDS, max_tp=4)
    planner = AcesoPlanner(hops_max=2, trials_max=5)
    proposals = planner.proposals(case, mode)
    kinds = gpus_of(checked_plans(case, proposals))
    assert kinds == {"A100-40@us-central1-a", "V100-16@us-central1-a"}
    assert planner.proposals(case, mode) == proposals


def test_fixed_estimates_know_of_gradient_sums():
    case = small_case(TWO_KINDS[0])
    inputs = inputs_from(case, fleets_of(case)[0])
    config = config_of(8, (26, 1, 8))
    silent = AcesoModel(inputs, replace(FIXED, sync=False)).judge(config).ms
    summed = AcesoModel(inputs).judge(config).ms - silent
    weights = sum(inputs.weights_mb[1, 1])
    assert summed == pytest.approx(2 * 7 / 8 * weights / inputs.between_mb_per_ms)


# Golden results ---------------------------------------------------------------------------------


def golden_inputs(reference, memory_mb: float = 40960) -> AcesoInputs:
    toy = load_toy(reference)
    keys = [(b, t) for b in (1, 2, 4, 8) for t in (1, 2, 4)]
    sent = [4 * floats / 2**20 for floats in toy.output_floats()]
    weights = [4 * floats / 2**20 for floats in toy.parameters()]
    times = {"gpu": "A100-40"}
    return AcesoInputs(
        forward_ms={k: tuple(toy.forward_ms(**times, tp=k[1], samples=k[0])) for k in keys},
        backward_ms={k: tuple(toy.backward_ms(**times, tp=k[1], samples=k[0])) for k in keys},
        in_mb={k: tuple(k[0] * mb for mb in (4 * 512 / 2**20, *sent[:-1])) for k in keys},
        out_mb={k: tuple(k[0] * mb for mb in sent) for k in keys},
        weights_mb={k: tuple(mb / k[1] for mb in weights) for k in keys},
        kept_mb={
            k: tuple(kept / 2**20 for kept in toy.kept_bytes(tp=k[1], samples=k[0])) for k in keys
        },
        scratch_forward_mb=dict.fromkeys(keys, (32.0,) * 14),
        scratch_backward_mb=dict.fromkeys(keys, (64.0,) * 14),
        within_mb_per_ms=200,
        between_mb_per_ms=10,
        gpus=8,
        gpus_per_node=4,
        memory_mb=memory_mb,
        batch=32,
        micro_batches=(1, 2, 4, 8),
        tp_max=4,
    )


def golden_config(entry) -> AcesoConfig:
    stages = (
        AcesoStage(stage["layers"][0], stage["layers"][1] + 1, stage["tp"], stage["dp"])
        for stage in entry["stages"]
    )
    return AcesoConfig(entry["micro_bs"], tuple(stages))


def test_golden_costs_of_given_plans(reference):
    model, given = (
        AcesoModel(golden_inputs(reference), PUBLISHED),
        load_golden(reference, "aceso")["given_plans"],
    )
    assert len(given) == 6
    for entry in given:
        judged = model.judge(golden_config(entry))
        assert judged.ms == pytest.approx(entry["time_ms"], rel=1e-9)
        for name, found in (
            ("time_list", judged.times_ms),
            ("memory_list_mb", judged.memory_mb),
            ("efficient_time_list", judged.efficient_ms),
            ("compute_time_list", judged.compute_ms),
            ("ideal_time_per_gpu", judged.ideal_ms),
            ("eff_loss_time_per_gpu", judged.loss_ms),
        ):
            assert found == pytest.approx(entry[name], rel=1e-9), name


def test_golden_primitives(reference):
    model = AcesoModel(golden_inputs(reference), PUBLISHED)
    for entry in load_golden(reference, "aceso")["primitives"]:
        given, wanted = entry["from"], entry["result"]
        start = config_of(
            given["micro_bs"], *zip(given["layers"], given["tp"], given["dp"], strict=True)
        )
        found = AcesoActions(model).apply(entry["action"], start, entry["bottleneck"])
        assert found == (wanted and golden_config(wanted)), entry


@pytest.mark.parametrize("memory_mb", [40960, 2200])
def test_golden_searches(reference, memory_mb):
    inputs = golden_inputs(reference, memory_mb)
    golden = load_golden(reference, "aceso")["search"][f"mem_{memory_mb}MB_hops3_trials30"]
    model = AcesoModel(inputs, PUBLISHED)
    for stages, entry in golden.items():
        start = initial(inputs, int(stages), repairs=PUBLISHED)
        assert start == golden_config(entry["initial"])
        assert model.judge(start).ms == pytest.approx(entry["initial"]["time_ms"], rel=1e-9)
        (best,) = search(inputs, [int(stages)], repairs=PUBLISHED)
        assert best.ms <= entry["best"]["time_ms"] * (1 + 1e-9), stages
        assert model.judge(best.config).fits
