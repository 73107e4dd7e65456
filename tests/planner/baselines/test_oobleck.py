"""Oobleck's templates, its mixes and its shares, by hand and against golden results."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from planner.baselines.oobleck.planner import (
    Instances,
    OobleckInputs,
    OobleckPlan,
    OobleckPlanner,
    OobleckTemplate,
    OobleckTemplates,
    deviation,
    instantiate,
    pipeline_time,
    search,
    share_micro_batches,
    stage_time,
    to_plan,
)
from planner.baselines.shared.equal_gpus import fleets_of
from simulator.inputs.plan_check import check_plan
from tests.planner.baselines.golden_inputs import load_golden, load_toy
from tests.planner.baselines.small_case import checked_plans, pool, small_case

TWO_KINDS = (pool("A100-40", 16, per_machine=4), pool("V100-16", 6, per_machine=4))


def equal_layers(
    *forward: float, nodes: int = 1, gpus: int = 1, micro_batches: int = 8
) -> OobleckInputs:
    """Layers whose backward takes twice their forward, and free all-reduces."""
    count = len(forward)
    return OobleckInputs(
        forward=forward,
        backward=tuple(2 * ahead for ahead in forward),
        within={1 << k: (0.0,) * count for k in range(gpus.bit_length())},
        between=(0.0,) * (nodes + 1),
        memory_bytes=(1.0,) * count,
        node_memory_bytes=float(count),
        nodes=nodes,
        gpus_per_node=gpus,
        micro_batches=micro_batches,
    )


def test_a_stage_is_summed_in_both_passes():
    inputs = replace(equal_layers(1.0, 2.0, gpus=2), within={2: (0.25, 0.5)})
    assert stage_time(inputs, 0, 1, 2) == 9 / 2 + 2 * 0.75


def test_the_slowest_stage_sets_the_time():
    assert pipeline_time([3.0]) == (12.0, 0)
    # Both stages (5), the slowest (3) 2 x 2 + 0 + 1 times, and both again from the slowest on (5).
    assert pipeline_time([3.0, 2.0]) == (5 + 5 * 3 + 5, 0)
    # Of equal stages the last one counts as the slowest, which leaves less behind it.
    assert pipeline_time([3.0, 3.0]) == (6 + 6 * 3 + 3, 1)


def test_templates_are_as_good_as_any_cut_of_nodes():
    rng = random.Random(3)
    for _ in range(12):
        forward = [float(rng.randint(1, 9)) for _ in range(6)]
        inputs = equal_layers(*forward, nodes=2)
        # With one GPU a node, two nodes are two stages, and any cut of the layers is open.
        wanted = min(
            pipeline_time([stage_time(inputs, 0, cut - 1, 1), stage_time(inputs, cut, 5, 1)])
            for cut in range(1, 6)
        )
        template = OobleckTemplates(inputs).template(2)
        assert template is not None
        assert (template.time, template.slowest) == wanted


def test_the_time_of_a_template_is_that_of_its_stages():
    inputs = equal_layers(3.0, 1.0, 2.0, 5.0, 1.0, 4.0, 2.0, 2.0, nodes=3, gpus=4)
    inputs = replace(inputs, within={g: (0.4 * (g - 1),) * 8 for g in (1, 2, 4)})
    for nodes in (1, 2, 3):
        template = OobleckTemplates(inputs).template(nodes)
        assert template is not None
        times = [stage_time(inputs, *stage) for stage in template.stages]
        assert pipeline_time(times) == (pytest.approx(template.time), template.slowest)
        assert sum(gpus for *_, gpus in template.stages) == 4 * nodes
        ends = [first for first, *_ in template.stages[1:]]
        assert ends == [last + 1 for _, last, _ in template.stages[:-1]]


def test_an_odd_number_of_gpus_is_not_halved():
    inputs = replace(equal_layers(1.0, 1.0, gpus=2), gpus_per_node=3)
    assert OobleckTemplates(inputs).template(1) is None


def test_shares_are_optimal():
    rng = random.Random(7)
    refused = 0
    for _ in range(200):
        kinds = rng.randint(1, 3)
        counts = [rng.randint(1, 4) for _ in range(kinds)]
        pace = [rng.uniform(0.2, 5.0) for _ in range(kinds)]
        total = rng.randint(1, 30)
        all_shares = [
            shares
            for shares in itertools.product(range(1, total + 1), repeat=kinds)
            if sum(n * x for n, x in zip(counts, shares, strict=True)) == total
        ]
        found = share_micro_batches(total, counts, pace)
        if not all_shares:
            assert found is None
            refused += 1
            continue
        assert found in all_shares
        assert deviation(found, pace) == min(deviation(s, pace) for s in all_shares)
    assert 0 < refused < 200


def test_mixes_use_every_node_and_pay_for_their_gradient_sums():
    templates = [OobleckTemplate(n, 12.0 * n, 0, ((0, 0, 1),) * n) for n in (1, 2, 3)]
    inputs = replace(equal_layers(1.0, nodes=4, micro_batches=12), between=(0, 0, 7, 100, 200))
    plans = instantiate(inputs, templates)
    mixes = {tuple((i.template.nodes, i.count) for i in plan.mix) for plan in plans}
    assert mixes == {((1, 4),), ((1, 2), (2, 1)), ((1, 1), (3, 1)), ((2, 2),)}
    by_mix = {tuple((i.template.nodes, i.count) for i in plan.mix): plan for plan in plans}
    assert by_mix[((2, 2),)].time == 24.0 * 6 + 7
    assert by_mix[((1, 4),)].time == 12.0 * 3 + 200
    assert [plan.time for plan in plans] == sorted(plan.time for plan in plans)
    assert {
        sum(one.count for one in plan.mix)
        for plan in instantiate(replace(inputs, copies=3), templates)
    } == {3, 4}


def test_templates_hold_the_model_and_leave_room_for_copies():
    inputs = equal_layers(*[1.0] * 6, nodes=6)
    inputs = replace(inputs, node_memory_bytes=3.0)  # Two nodes for a model of six.
    used = {one.template.nodes for plan in search(inputs) for one in plan.mix}
    assert used == {2, 3, 4, 6}
    used = {one.template.nodes for p in search(replace(inputs, copies=2)) for one in p.mix}
    assert used == {2, 3, 4}


def test_stages_of_several_gpus_are_tp_groups_or_split():
    case = small_case(*TWO_KINDS)
    fleet = fleets_of(case)[0]
    one = OobleckTemplate(1, 1.0, 0, ((0, 12, 2), (13, 25, 2)))
    other = OobleckTemplate(1, 1.0, 0, ((0, 25, 4),))
    own = OobleckPlan(1.0, (Instances(one, 3, 12), Instances(other, 1, 28)))
    plan = to_plan(own, case.job, fleet, micro_batch_size=1, degrees=(1, 2, 4))
    assert not isinstance(plan, str)
    assert [p.micro_batches for p in plan.pipelines] == [12, 12, 12, 28]
    assert [s.tp for s in plan.pipelines[0].stages] == [2, 2]
    assert check_plan(plan, case.job, case.cluster) == ()
    # Without TP of 4 the last pipeline divides micro batches of four samples, 16 of them in all.
    plan = to_plan(own, case.job, fleet, micro_batch_size=1, degrees=(1, 2))
    assert not isinstance(plan, str)
    assert plan.micro_batch_size == 4
    assert [p.micro_batches for p in plan.pipelines] == [3, 3, 3, 7]
    assert plan.pipelines[3].stages[0].split == (1, 1, 1, 1)
    assert check_plan(plan, case.job, case.cluster) == ()


def test_proposals_of_a_real_case_are_valid_and_sorted():
    case = small_case(*TWO_KINDS)
    proposals = OobleckPlanner().proposals(case, "fixed")
    assert len(proposals) > 10
    plans = checked_plans(case, proposals)
    assert len(plans) == len(proposals)
    assert {"A100-40@us-central1-a": 16} in [plan.gpus_used() for plan in plans]
    assert OobleckPlanner().proposals(case, "published") == proposals


# Golden results ---------------------------------------------------------------------------------


def golden_inputs(reference, *, nodes: int, gpus: int) -> OobleckInputs:
    toy = load_toy(reference)
    count = len(toy.kinds)
    return OobleckInputs(
        forward=tuple(toy.forward_ms("A100-40", tp=1, samples=1)),
        backward=tuple(toy.backward_ms("A100-40", tp=1, samples=1)),
        within={g: (0.05 * (g - 1),) * count for g in (1, 2, 4)},
        between=(0.0,) * (nodes + 1),
        memory_bytes=(0.0,) * count,
        node_memory_bytes=1.0,
        nodes=nodes,
        gpus_per_node=gpus,
        micro_batches=32,
    )


def test_golden_templates(reference):
    wanted = load_golden(reference, "oobleck")["templates"]
    for one in wanted:
        inputs = golden_inputs(reference, nodes=one["nodes"], gpus=one["gpus_per_node"])
        template = OobleckTemplates(inputs).template(one["nodes"])
        assert template is not None
        assert template.time == pytest.approx(one["t_ms"], rel=1e-9)
        assert template.slowest == one["kstar"]
        assert [list(stage) for stage in template.stages] == one["stages[first,last,gpus]"]
    assert len(wanted) == 8


def test_golden_instances(reference):
    wanted = load_golden(reference, "oobleck")["instantiation"]
    inputs = golden_inputs(reference, nodes=wanted["nodes"], gpus=1)
    found = [OobleckTemplates(inputs).template(nodes) for nodes in wanted["template_nodes"]]
    templates = [template for template in found if template is not None]
    assert [len(template.stages) for template in templates] == wanted["template_stages"]
    plans = instantiate(inputs, templates)
    options = sorted(wanted["options"], key=lambda o: o["iteration_ms_without_allreduce"])
    assert options[0] == wanted["best_by_iteration"]
    assert len(plans) == len(options)
    for plan, option in zip(plans, options, strict=True):
        counts = [0] * len(templates)
        for one in plan.mix:
            counts[templates.index(one.template)] = one.count
        assert counts == option["instances_per_template"]
        shares = [one.micro_batches for one in plan.mix]
        assert shares == option["microbatches_per_instance"]
        pace = [one.template.time / len(one.template.stages) for one in plan.mix]
        assert deviation(shares, pace) == pytest.approx(option["objective"], rel=1e-9)
        wanted_time = option["iteration_ms_without_allreduce"]
        assert plan.time == pytest.approx(wanted_time, rel=1e-9)
        assert math.isclose(sum(i.count * i.template.nodes for i in plan.mix), 9)
