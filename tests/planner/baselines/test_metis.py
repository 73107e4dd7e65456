"""Metis' groups, balancers, costs and search, by hand and against golden results."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from planner.baselines.metis.adapter import inputs_from, to_plan
from planner.baselines.metis.balancer import (
    adapt_capacities,
    balance_layers,
    binary_digits,
    share_samples,
)
from planner.baselines.metis.cost import (
    FIXED,
    PUBLISHED,
    MetisInputs,
    MetisNode,
    MetisPlan,
    Ranks,
    group_ms,
    plan_ms,
    replica_shares,
    stage_mb,
)
from planner.baselines.metis.groups import device_groups, distinct_orders, merged
from planner.baselines.metis.planner import MetisPlanner, search, strategies
from planner.baselines.shared.equal_gpus import fleets_of
from simulator.inputs.plan_check import check_plan
from tests.planner.baselines.golden_inputs import load_golden, load_toy
from tests.planner.baselines.small_case import pool, small_case

COUNTED = replace(PUBLISHED, stage_count=True)
LINKED = replace(COUNTED, bandwidth=True)
GIB_PER_MS = 2.0**20
TWO_KINDS = (pool("A100-40", 4, per_machine=4), pool("V100-16", 4, per_machine=4))


def inputs_of(*nodes: MetisNode, layers: int = 4, **changes) -> MetisInputs:
    """Layers of one millisecond per sample on kind ``a`` and two on ``b``; tp halves them."""
    keys = [(kind, t, b) for kind in "ab" for t in (1, 2) for b in (1, 2, 4)]
    given = MetisInputs(
        layer_ms={k: ({"a": 1.0, "b": 2.0}[k[0]] * k[2] / k[1],) * layers for k in keys},
        layer_mb={k: (10.0 * k[2] / k[1],) * layers for k in keys},
        sync_ms=dict.fromkeys(keys, 0.5),
        optimizer_ms=8.0,
        batch_ms=0.25,
        parameter_bytes=(GIB_PER_MS,) * layers,
        nodes=nodes,
        batch=8,
        sequence=1024,
        hidden=1024,
        vocabulary=4096,
        tp_max=2,
        samples_max=4,
    )
    return replace(given, **changes)


def test_groups_are_powers_of_two_close_to_equal():
    assert list(device_groups(2, gpus=8, variance=1.0, permuted_max=4)) == [(4, 4)]
    assert list(device_groups(2, gpus=6, variance=0.5, permuted_max=4)) == [(4, 2), (2, 4)]
    assert list(device_groups(2, gpus=7, variance=0.5, permuted_max=4)) == []


def test_each_order_of_blocks_comes_once():
    orders = list(distinct_orders([(1,), (1,), (2,), (2,), (4,)]))
    assert len(orders) == len(set(orders)) == 30
    assert all(Counter(order) == Counter(orders[0]) for order in orders)


def test_blocks_merge_until_there_are_few_enough():
    ones = [(1,)] * 5
    assert merged(ones, 4) == [(1, 1), (1, 1), (1,)]
    assert merged([(1,), (2,), (4,)], 2) == [(1,), (2,), (4,)]  # No two smallest are equal.


def test_samples_go_by_speed():
    assert share_samples(7, [2.0, 2.0, 1.0, 1.0]) == (3, 2, 1, 1)
    assert binary_digits(11) == [8, 2, 1]


def test_layers_go_by_capacity():
    assert balance_layers([0.5, 0.5], [0.25] * 4) == (0, 2, 4)
    assert balance_layers([0.25, 0.75], [0.125] * 8) == (0, 2, 8)


def test_capacity_moves_to_where_there_is_memory():
    # The first stage keeps 0.9 x 0.5 x 100 / 120, and the second has 0.33 to offer.
    adapted = adapt_capacities([0.5, 0.5], memory_mb=[100.0, 200.0], demand_mb=[120.0, 120.0])
    assert adapted == pytest.approx([0.375, 0.625])
    assert adapt_capacities([0.5, 0.5], memory_mb=[9.0, 9.0], demand_mb=[10.0, 10.0]) is None


def test_a_plan_pays_for_steady_state_fill_sync_update_gradients_and_cuts():
    inputs = inputs_of(MetisNode("a", 2, 4.0, 1.0, 1e6), MetisNode("b", 2, 2.0, 0.5, 1e6))
    plan = MetisPlan(("a", "b"), (2, 2), ((2, 1), (1, 2)), 2, (0, 3, 4), 2)
    # Stages of 3 x 2 ms and 1 x 2 x 4 / 2 ms; sync 0.5 and making 0.25 per micro batch; an
    # update of 8 x 3 / 4; gradients of 3 parts over 4 GB/s; 2 samples over the slower way out,
    # as wide as the vocabulary over the first stage's one tensor rank, for the head is next.
    assert plan_ms(inputs, plan) == pytest.approx(
        6 + (6 + 4) + 1.0 + 0.5 + 6 + 3 / 4 + 2 * 4096 / (0.5 * 1024)
    )
    published = plan_ms(inputs, plan, repairs=PUBLISHED)
    assert published == pytest.approx(plan_ms(inputs, plan) - 2 * 4096 * (2 - 0.5) / 1024)


def test_replicas_on_two_machines_sum_gradients_between_them():
    inputs = inputs_of(MetisNode("a", 1, 4.0, 1.0, 1e6), MetisNode("a", 1, 4.0, 1.0, 1e6))
    plan = MetisPlan(("a",), (2,), ((2, 1),), 2, (0, 4), 1)
    repaired, linked = plan_ms(inputs, plan), plan_ms(inputs, plan, repairs=LINKED)
    assert repaired is not None
    assert repaired - linked == pytest.approx(4.0 / 1.0 - 4.0 / 4.0)  # As one machine: 4 GB/s.


def test_a_missing_profile_drops_the_plan():
    inputs = inputs_of(MetisNode("a", 2, 4.0, 1.0, 1e6))
    plan = MetisPlan(("a",), (2,), ((1, 2),), 1, (0, 4), 1)
    assert plan_ms(inputs, plan) is None  # Not measured: micro batches of 8.
    silent = replace(inputs, sync_ms=dict.fromkeys(inputs.sync_ms, 0.0))
    plan = replace(plan, batches=2)
    assert plan_ms(silent, plan) is not None
    assert plan_ms(silent, plan, repairs=PUBLISHED) is None  # Zero counts as missing.


def test_memory_is_that_of_the_tightest_gpu_or_as_published_of_the_group():
    inputs = inputs_of(MetisNode("a", 1, 4.0, 1.0, 100.0), MetisNode("b", 1, 4.0, 1.0, 30.0))
    ranks = Ranks(inputs, ("a", "b"), (2,))

    def mb(repairs, samples):
        return stage_mb(inputs, ranks, 0, (2, 1), 8 // samples, (0, 2), repairs=repairs)

    # One sample each: 20 of 100 and of 30. Three and one: 80, as if of four, of 100 and 20 of 30.
    assert replica_shares(inputs, ["a", "b"], (2, 1), 3) == [("a", 2), ("b", 1)]
    assert mb(FIXED, 2) == (30.0, pytest.approx(20.001))
    assert mb(FIXED, 4) == (100.0, pytest.approx(80.001))
    assert mb(PUBLISHED, 4) == (130.0, pytest.approx(0.001 + 5 * (40 + 20 + 20)))


def test_published_stops_at_the_first_strategy_that_fits():
    inputs = inputs_of(MetisNode("a", 4, 4.0, 1.0, 1e6), tp_max=4)
    fixed = [plan.strategies for plan in strategies(inputs, ("a",), (2, 2), 4)]
    assert fixed == [((2, 1), (2, 1)), ((1, 2), (2, 1)), ((1, 2), (1, 2))]
    published = strategies(inputs, ("a",), (2, 2), 4, repairs=PUBLISHED)
    assert [plan.strategies for plan in published] == fixed[:1]


def test_a_mixed_group_becomes_a_split_stage():
    case = small_case(*TWO_KINDS)
    kinds = fleets_of(case)
    inputs = inputs_from(case, kinds)
    own = MetisPlan(("A100-40", "V100-16"), (8,), ((4, 2),), 4, (0, 26), 1)
    plan = to_plan(own, inputs, case.job, kinds)
    assert not isinstance(plan, str), plan
    (pipeline,) = plan.pipelines
    (stage,) = pipeline.stages
    assert (plan.micro_batch_size, pipeline.micro_batches, stage.tp) == (16, 4, 2)
    assert [place.gpu for place in stage.places] == ["A100-40"] * 2 + ["V100-16"] * 2
    assert sum(stage.samples(16)) == 16
    assert stage.samples(16)[0] > stage.samples(16)[2]
    assert check_plan(plan, case.job, case.cluster) == ()


def test_equal_replicas_become_pipelines():
    case = small_case(*TWO_KINDS)
    kinds = fleets_of(case)
    own = MetisPlan(("A100-40", "V100-16"), (4, 4), ((2, 2), (4, 1)), 8, (0, 20, 26), 2)
    plan = to_plan(own, inputs_from(case, kinds), case.job, kinds)
    assert not isinstance(plan, str), plan
    assert [p.micro_batches for p in plan.pipelines] == [8, 8]
    assert [stage.split for stage in plan.pipelines[0].stages] == [(1,), (1, 1)]
    assert plan.micro_batch_size == 4
    assert check_plan(plan, case.job, case.cluster) == ()


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (MetisPlan(("A100-40",), (4,), ((4, 1),), 8, (0, 25), 1), "its partition ends at layer 25"),
        (MetisPlan(("A100-40",), (4,), ((4, 1),), 32, (0, 26), 1), "micro batches of 2 samples do"),
        (
            MetisPlan(("A100-40",), (2, 2), ((2, 1),) * 2, 8, (0, 26, 26), 2),
            "stage 1 has no layers",
        ),
    ],
)
def test_plans_that_cannot_be_expressed_say_why(own, reason):
    case = small_case(TWO_KINDS[0])
    kinds = fleets_of(case)
    assert str(to_plan(own, inputs_from(case, kinds), case.job, kinds)).startswith(reason)


@pytest.mark.parametrize("mode", ["fixed", "published"])
def test_proposals_of_a_real_case_are_valid_and_sorted(mode):
    case = small_case(*TWO_KINDS, max_tp=4)
    planner = MetisPlanner(groups_max=3)
    proposals = planner.proposals(case, mode)
    assert [p.seconds for p in proposals] == sorted(p.seconds for p in proposals)
    plans = [p.plan for p in proposals if p.plan is not None]
    assert len(plans) > 50
    for proposal in proposals:
        assert (proposal.plan is None) == bool(proposal.why_not)
    for plan in plans[:100]:
        assert check_plan(plan, case.job, case.cluster) == ()
        assert plan.device_count == 8
    assert planner.proposals(case, mode) == proposals


# Golden results ---------------------------------------------------------------------------------


def golden_inputs(reference, memory_gb: tuple[int, int] = (40, 16)) -> MetisInputs:
    toy = load_toy(reference)
    parameters = toy.parameters()
    layer_ms, layer_mb = {}, {}
    for kind, gpu in (("A100", "A100-40"), ("V100", "V100-16")):
        for t in (1, 2, 4):
            for b in (1, 2, 4, 8):
                ahead = toy.forward_ms(gpu, tp=t, samples=b)
                back = toy.backward_ms(gpu, tp=t, samples=b)
                kept = toy.kept_bytes(tp=t, samples=b)
                layer_ms[kind, t, b] = tuple(f + g for f, g in zip(ahead, back, strict=True))
                layer_mb[kind, t, b] = tuple(
                    16 * p / t / 2**20 + k / 2**20 for p, k in zip(parameters, kept, strict=True)
                )
    return MetisInputs(
        layer_ms=layer_ms,
        layer_mb=layer_mb,
        sync_ms=dict.fromkeys(layer_ms, 0.5),
        optimizer_ms=8.0,
        batch_ms=0.1,
        parameter_bytes=tuple(4 * p for p in parameters),
        nodes=(
            MetisNode("A100", 4, 200, 10, memory_gb[0] * 1024),
            MetisNode("V100", 4, 100, 10, memory_gb[1] * 1024),
        ),
        batch=32,
        sequence=512,
        hidden=1024,
        vocabulary=32000,
        tp_max=4,
        samples_max=8,
    )


def pairs(entry) -> tuple[tuple[int, int], ...]:
    return tuple((d, t) for d, t in entry["strategies(dp,tp)"])


def test_golden_units(reference):
    units = load_golden(reference, "metis")["units"]
    for name, wanted in units["device_groups(8 gpus)"].items():
        given = dict(part.split("=") for part in name.split(","))
        groups = device_groups(
            int(given["stages"]),
            gpus=8,
            variance=float(given["variance"]),
            permuted_max=int(given["max_permute_len"]),
        )
        assert [list(group) for group in groups] == wanted, name
    inputs = golden_inputs(reference)
    row = inputs.layer_ms["A100", 1, 1]
    demands = [ms / sum(row) for ms in row]
    for entry in units["layer_compute_balancer"]:
        assert list(balance_layers(entry["stage_capacity"], demands)) == entry["partition"]
    for entry in units["data_load_balancer"]:
        d, t = entry["strategy(dp,tp)"]
        shares = replica_shares(inputs, entry["device_types"], (d, t), entry["bs"])
        assert [share for _, share in shares] == entry["split"]
    for entry in units["adjust_compute_capacity"]:
        adapted = adapt_capacities(
            entry["compute_capacity"],
            memory_mb=entry["memory_capacity"],
            demand_mb=entry["memory_demand"],
        )
        wanted = entry["adjusted"]
        assert adapted == (wanted if wanted is None else pytest.approx(wanted, rel=1e-9))


def test_golden_costs_of_given_plans(reference):
    inputs, given = golden_inputs(reference), load_golden(reference, "metis")["given_plans"]
    assert len(given) == 6
    for entry in given:
        groups, cuts = tuple(entry["device_groups"]), tuple(entry["layer_partition"])
        kinds, batches = tuple(entry["node_sequence"]), entry["batches"]
        own = MetisPlan(kinds, groups, pairs(entry), batches, cuts, len(groups))
        for repairs, key in ((COUNTED, "as_published"), (LINKED, "fixed")):
            wanted = pytest.approx(entry[f"cost_ms_bandwidth_{key}"], rel=1e-9)
            assert plan_ms(inputs, own, repairs=repairs) == wanted
        ranks = Ranks(inputs, kinds, groups)
        speeds, memory = [], []
        for s, strategy in enumerate(own.strategies):
            stage = {"batches": batches, "layers": (0, 14)}
            speeds.append(1 / group_ms(inputs, ranks.kinds(s), strategy, **stage))
            layers = cuts[s], cuts[s + 1]
            memory.append(stage_mb(inputs, ranks, s, strategy, batches, layers, repairs=PUBLISHED))
        wanted = pytest.approx(entry["stage_compute_performance"], rel=1e-9)
        assert [speed / sum(speeds) for speed in speeds] == wanted
        assert [has for has, _ in memory] == entry["stage_memory_capacity_mb"]
        wanted = pytest.approx(entry["stage_memory_demand_mb"], rel=1e-9)
        assert [needs for _, needs in memory] == wanted


@pytest.mark.parametrize("small", [False, True])
def test_golden_strategy_sequences(reference, small):
    golden = load_golden(reference, "metis")
    inputs = golden_inputs(reference, (4, 3) if small else (40, 16))
    for entry in (golden["small_memory"] if small else golden)["intra_stage_sequences"]:
        found = strategies(
            inputs,
            tuple(entry["node_sequence"]),
            tuple(entry["device_groups"]),
            entry["batches"],
            repairs=PUBLISHED,
        )
        assert [(own.strategies, list(own.cuts), own.attempts) for own in found] == [
            (pairs(one), one["layer_partition"], one["num_repartition"]) for one in entry["yielded"]
        ]


@pytest.mark.parametrize(
    ("name", "repairs"),
    [
        ("as_published", PUBLISHED),
        ("stage_count_fixed", COUNTED),
        ("stage_count_and_bandwidth_fixed", LINKED),
        ("small_memory", LINKED),
    ],
)
def test_golden_search(reference, name, repairs):
    golden, small = load_golden(reference, "metis"), name == "small_memory"
    entry = golden[name] if small else golden["search"][name]
    plans = search(golden_inputs(reference, (4, 3) if small else (40, 16)), repairs=repairs)
    assert len(plans) == entry["costed_plans"]
    wanted = [one["cost_ms"] for one in entry["top5"]]
    assert [own.ms for own in plans[:5]] == pytest.approx(wanted, rel=1e-9)
    best = entry["top5"][0]
    assert (list(plans[0].groups), plans[0].strategies) == (best["device_groups"], pairs(best))
    if small:
        assert sum(own.attempts > 1 for own in plans) == entry["n_with_repartition>1"]
    else:
        bogus = [own for own in plans if own.stages_costed != len(own.groups)]
        assert len(bogus) == entry["bogus_plans(num_stage != number of groups)"]
