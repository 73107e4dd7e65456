"""DTFM's costs, its matching and its genetic search, by hand and against golden results."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from planner.baselines.dtfm.cost import (
    SENTINEL_S,
    DtfmCosts,
    DtfmInputs,
    cheapest_path,
    perfect_matching,
)
from planner.baselines.dtfm.planner import (
    DtfmPlanner,
    SeededRandom,
    accepted_up_to,
    chains,
    compute_seconds,
    crossover,
    devices_of,
    improved,
    inputs_from,
    links,
    move_around,
    search,
)
from tests.planner.baselines.golden_inputs import load_golden
from tests.planner.baselines.small_case import checked_plans, pool, small_case

FAR = (
    pool("A100-40", 4, per_machine=4),
    pool("V100-16", 2, per_machine=2),
    pool("A100-40", 2, per_machine=2, zone="us-west1-a"),
)


def hand_inputs(
    bandwidth, *, stages: int, delay: float = 0.0, activation: float = 1e-3
) -> DtfmInputs:
    table = np.array(bandwidth, dtype=float)
    count = len(table)
    return DtfmInputs(
        np.full((count, count), delay), table, activation, 1.0, stages, count // stages
    )


def sites(*site_of_device: int, near: float = 100.0, far: float = 1.0) -> list[list[float]]:
    return [[near if a == b else far for b in site_of_device] for a in site_of_device]


def random_inputs(rng: random.Random, *, stages: int, replicas: int) -> DtfmInputs:
    count = stages * replicas
    table = np.array([[rng.uniform(1, 50) for _ in range(count)] for _ in range(count)])
    table = np.minimum(table, table.T)
    return replace(hand_inputs(table, stages=stages, activation=0.1), delay_ms=2 * table)


def test_the_busiest_device_pays_for_all_others_of_its_group():
    costs = DtfmCosts(hand_inputs(sites(0, 0, 1), stages=1, delay=3.0))
    # Device 2 exchanges a third of a GB with two others: 2 x 2 x (3 ms + 8 / 3 s).
    assert costs.data_parallel(((0, 1, 2),)) == pytest.approx(4 * (0.003 + 8 / 3))


def test_a_plan_pays_each_boundary_twice():
    inputs = hand_inputs(sites(0, 0, 1, 1), stages=2)
    plan = DtfmCosts(inputs).plan(((0, 1), (2, 3)))
    assert plan.data_parallel_s == pytest.approx(2 * 0.5 * 8 / 100)
    assert plan.pipeline_s == pytest.approx(8e-3)
    assert plan.seconds == pytest.approx(plan.data_parallel_s + 2 * plan.pipeline_s)


def test_matchings_are_the_best_of_all():
    rng = random.Random(11)
    for size in (1, 2, 3, 5):
        for _ in range(20):
            inputs = random_inputs(rng, stages=2, replicas=size)
            costs = DtfmCosts(inputs)
            here, there = tuple(range(size)), tuple(range(size, 2 * size))
            value, partner = costs.matching(here, there)
            best = min(
                max(costs.send[a, b] for a, b in zip(here, order, strict=True))
                for order in itertools.permutations(there)
            )
            assert value == best
            assert sorted(partner) == list(range(size))
            assert value == max(costs.send[a, there[k]] for a, k in enumerate(partner))


def test_no_pairing_is_found_where_there_is_none():
    allowed = np.array([[1, 0, 0], [1, 0, 0], [1, 1, 1]], dtype=bool)
    assert perfect_matching(allowed) is None
    assert perfect_matching(~np.eye(3, dtype=bool)) in ([1, 2, 0], [2, 0, 1])


def test_paths_are_the_cheapest_of_all():
    rng = random.Random(13)
    for count in (1, 2, 3, 5, 6):
        table = np.array([[rng.uniform(0, 9) for _ in range(count)] for _ in range(count)])
        table = table + table.T
        seconds, path = cheapest_path(table)
        length = {
            order: sum(table[a, b] for a, b in itertools.pairwise(order))
            for order in itertools.permutations(range(count))
        }
        assert seconds == pytest.approx(min(length.values()))
        assert length[path] == pytest.approx(seconds)


def test_random_numbers_are_repeatable_and_even():
    draws = SeededRandom(42)
    # The first outputs of splitmix64 for this seed, cut to 16 bits.
    assert [draws.below(1 << 16) for _ in range(3)] == [
        13679457532755275413 >> 48,
        2949826092126892291 >> 48,
        5139283748462763858 >> 48,
    ]
    counts = Counter(draws.below(5) for _ in range(5000))
    assert set(counts) == set(range(5))
    assert min(counts.values()) > 900
    assert sorted(draws.shuffled(9)) == list(range(9))
    firsts = Counter(draws.shuffled(3)[0] for _ in range(3000))
    assert min(firsts.values()) > 900


@pytest.mark.parametrize(
    ("child", "first", "second", "fixed", "published"),
    [(6.0, 5.0, 9.0, 9.0, 5.0), (0.3, 0.1, 0.2, 0.2, 1.0), (0.3, 0.1, 0.4, 0.4, 0.1)],
)
def test_a_child_is_measured_by_a_truth_value_only_as_published(
    child, first, second, fixed, published
):
    assert accepted_up_to(child, first, second, "fixed") == fixed
    assert accepted_up_to(child, first, second, "published") == published


def test_children_and_moves_keep_the_groups_balanced():
    rng, draws = random.Random(17), SeededRandom(3)
    for stages, replicas in ((2, 4), (4, 2), (3, 3), (4, 1), (1, 4)):
        inputs = random_inputs(rng, stages=stages, replicas=replicas)
        labels = [device // replicas for device in range(stages * replicas)]
        for _ in range(10):
            other = [labels[device] for device in draws.shuffled(len(labels))]
            child = crossover(labels, other, inputs, draws)
            moved = improved(child, inputs, DtfmCosts(inputs).send)
            for result in (child, moved):
                assert Counter(result) == dict.fromkeys(range(stages), replicas)


def test_a_cycle_moves_the_best_connected_while_that_gains():
    inputs = hand_inputs(sites(0, 0, 0, 1, 1, 1), stages=2)
    near, far = 0.08e-3, 8e-3
    locked, touched = set(), set()
    found = move_around([0, 0, 1, 0, 1, 1], inputs, DtfmCosts(inputs).send, locked, touched)
    assert found is not None
    # Device 0 leaves for {2, 4, 5}, and in exchange device 2 joins {1, 3}.
    assert found[0] == [1, 0, 0, 0, 1, 1]
    first = (near + 2 * far) / 3 - near
    second = (near + far) / 2 - near
    assert found[1] == pytest.approx(first + second)
    assert (locked, touched) == ({0, 2}, {0, 1})


def test_a_cycle_that_gains_nothing_is_undone():
    # All links between groups are cheap, and those within are not.
    inputs = hand_inputs([[1, 1, 9, 9], [1, 1, 9, 9], [9, 9, 1, 1], [9, 9, 1, 1]], stages=2)
    found = move_around([0, 0, 1, 1], inputs, DtfmCosts(inputs).send, set(), set())
    assert found == ([0, 0, 1, 1], 0.0)


def test_the_last_cycle_never_counts():
    inputs = hand_inputs(sites(0, 0, 0, 1, 1, 1), stages=2)
    labels = [0, 0, 1, 0, 1, 1]
    assert improved(labels, inputs, DtfmCosts(inputs).send) == labels
    inputs = hand_inputs(sites(0, 0, 1, 1, 2, 2, 3, 3), stages=4)
    labels = [0, 0, 1, 1, 2, 2, 3, 3]
    assert improved(labels, inputs, DtfmCosts(inputs).send) != labels


def test_pipelines_follow_the_pairings():
    inputs = hand_inputs(sites(0, 1, 1, 0, 0, 1), stages=3)
    costs = DtfmCosts(inputs)
    plan = costs.plan(((0, 1), (2, 3), (4, 5)))
    for chain in chains(plan, costs):
        assert len({(0, 1, 1, 0, 0, 1)[device] for device in chain}) == 1


def test_links_differ_between_machines_and_zones():
    case = small_case(*FAR)
    devices = devices_of(case, 1)
    assert [machine for _, machine in devices] == [0, 0, 0, 0, 1, 1, 2, 2]
    delay, bandwidth = links(case, devices)
    assert delay[0, 1] < delay[0, 6] < delay[0, 4]
    assert bandwidth[0, 1] > bandwidth[0, 6] >= bandwidth[0, 4]
    published, fixed = (
        inputs_from(case, delay, bandwidth, tp=1, stages=2, micro_batch_size=1, mode=mode)
        for mode in ("published", "fixed")
    )
    # Parameters of 13 layers in fp32, in GB; a sequence of 2,048 tokens of 1,024 numbers.
    assert fixed.activation_gb == 4 * 2048 * 1024 / 1e9
    assert 0.7 < fixed.gradient_gb < 1.0
    # The published units: bytes for GB, and an eighth for eight times the bandwidth.
    assert published.gradient_gb == pytest.approx(fixed.gradient_gb * 1e9)
    assert published.activation_gb == pytest.approx(fixed.activation_gb * 1e9)
    ratio = fixed.bandwidth_gbit_per_s / published.bandwidth_gbit_per_s
    assert ratio == pytest.approx(np.full((8, 8), 64.0))


def test_the_slowest_kind_sets_the_compute_time():
    case = small_case(*FAR)
    devices = devices_of(case, 1)

    def pass_s(gpu: str, *layers: int) -> float:
        return sum(case.costs.stage_seconds(gpu, tp=1, samples=2, layers=layers, recompute="none"))

    a100, v100 = 0, 6
    assert (devices[a100][0].gpu, devices[v100][0].gpu) == ("A100-40", "V100-16")
    compute = partial(compute_seconds, case, devices=devices, tp=1, micro_batch_size=2)
    assert compute([[a100]]) == pytest.approx(32 * pass_s("A100-40", 0, 26))
    assert compute([[a100], [v100]]) == pytest.approx(16 * pass_s("V100-16", 0, 26))
    slower = max(pass_s("A100-40", 0, 13), pass_s("V100-16", 13, 26))
    assert compute([[a100, v100]]) == pytest.approx(33 * slower)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fixed", "published"])
def test_proposals_of_a_real_case_are_valid_and_sorted(mode):
    case = small_case(*FAR)
    proposals = DtfmPlanner().proposals(case, mode)
    plans = checked_plans(case, proposals)
    assert len(plans) == len(proposals)
    for plan in plans:
        # Only one machine is large enough for groups of four.
        assert plan.device_count == (4 if plan.pipelines[0].stages[0].tp == 4 else 8)
    assert {plan.micro_batch_size for plan in plans} == {1, 2, 4, 8}
    if mode == "published":
        sizes = {len(p.pipelines[0].stages): p.micro_batch_size for p in reversed(plans)}
        assert sizes == {2: 1, 4: 1}, "the smallest message ranks first"
    assert DtfmPlanner().proposals(case, mode) == proposals


def test_a_batch_too_small_for_all_devices_has_no_plan():
    proposals = DtfmPlanner().proposals(small_case(*FAR, global_batch=1), "fixed")
    refused = [p for p in proposals if p.plan is None]
    assert "1 micro batches of 1 do not feed 8 pipelines" in [p.why_not for p in refused]
    # Their estimate counts compute like any other's, so that they do not all come first.
    assert refused[0] is not proposals[0]


# Golden results ---------------------------------------------------------------------------------


def golden_case(reference, name: str) -> tuple[DtfmInputs, dict]:
    raw = load_golden(reference, "dtfm")
    given, case = raw["inputs"], raw["cases"][name]
    network, shape = name.split("/")
    stages, replicas = (int(part[2:]) for part in shape.split("_"))
    delay, bandwidth = np.zeros((2, 8, 8))
    for a, b in itertools.product(range(8), repeat=2):
        if network == "two_nodes":
            gbps = given[network]["same_node_Gbps" if a // 4 == b // 4 else "other_Gbps"]
            delay[a, b], bandwidth[a, b] = given[network]["delay"], gbps
            continue
        table = given[network]
        one, other = sorted((table["site_of_device"][a], table["site_of_device"][b]))
        near = table["same_site"]
        pair = [near["delay"], near["bandwidth"]] if one == other else table[f"{one}-{other}"]
        delay[a, b], bandwidth[a, b] = pair
    sizes = case["send_activation_GB"], case["send_gradient_GB"]
    return DtfmInputs(delay, bandwidth, *sizes, stages, replicas), case


CASES = [f"{net}/{pd}" for net in ("three_sites", "two_nodes") for pd in ("pp2_dp4", "pp4_dp2")]


@pytest.mark.parametrize("name", CASES)
def test_golden_costs_of_given_partitions(reference, name):
    inputs, case = golden_case(reference, name)
    costs = DtfmCosts(inputs)
    for given in case["given"]:
        plan = costs.plan(tuple(map(tuple, given["partition"])))
        assert plan.data_parallel_s == pytest.approx(given["data_parallel_cost_s"], rel=1e-9)
        assert plan.pipeline_s == pytest.approx(given["pipeline_cost_s"], rel=1e-9)
        assert plan.seconds == pytest.approx(given["total_s"], rel=1e-9)


def partitions(devices: list[int], size: int):
    """All ways to divide devices into groups of a size."""
    if not devices:
        yield ()
        return
    first, *rest = devices
    for others in itertools.combinations(rest, size - 1):
        left = [device for device in rest if device not in others]
        for more in partitions(left, size):
            yield ((first, *others), *more)


@pytest.mark.parametrize("name", CASES)
def test_golden_optimum_and_search(reference, name):
    inputs, case = golden_case(reference, name)
    costs = DtfmCosts(inputs)
    totals = [costs.plan(p).seconds for p in partitions(list(range(8)), inputs.replicas)]
    assert len(totals) == case["partitions"]
    optimum = case["optimum_total"]
    assert min(totals) == pytest.approx(optimum, rel=1e-9)
    ties = sum(total <= optimum * (1 + 1e-9) for total in totals)
    assert ties == case["number_of_optimal_partitions"]
    bound = case["ga_best_over_20_seeds_worst"] * (1 + 1e-9)
    for seed in range(20):
        best = search(inputs, SeededRandom(seed))[0]
        assert optimum * (1 - 1e-9) <= best.seconds <= bound, seed


def test_golden_quirk_of_the_matching(reference):
    quirk = load_golden(reference, "dtfm")["matching_quirk"]
    inputs = hand_inputs(quirk["bandwidth"], stages=2, delay=quirk["delay"])
    here, there = quirk["partition"]
    published = replace(inputs, sentinel_s=SENTINEL_S)
    for one in (inputs, published):
        value = DtfmCosts(one).matching(here, there)[0]
        assert value == pytest.approx(quirk["activation_1e-3_cost"], rel=1e-9)
    huge = DtfmCosts(replace(published, activation_gb=1e6)).matching(here, there)[0]
    assert huge == pytest.approx(quirk["activation_1e6_cost"], rel=1e-9)
    right = DtfmCosts(replace(inputs, activation_gb=1e6)).matching(here, there)[0]
    ratio = right / quirk["activation_1e-3_cost"]
    assert ratio == pytest.approx(quirk["correct_ratio"], rel=1e-9)
