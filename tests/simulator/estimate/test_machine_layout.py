"""Which machine each device group gets, stage by stage or pipeline by pipeline."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from simulator.estimate.machine_layout import MachineLayout, lay_out
from simulator.spec.plan import Pipeline, Plan
from tests.simulator.worlds import place, random_plan, random_world, stage

Rows = list[list[int]]


def chain(*tps: int, first: int = 0) -> Pipeline:
    """A pipeline with these TP degrees, one layer per stage."""
    stages = tuple(stage(s, s + 1, place(), tp=tp) for s, tp in enumerate(tps, start=first))
    return Pipeline(4, stages)


def machines(pipelines: tuple[Pipeline, ...], together: int | None) -> Rows:
    """The machine number of each stage of each pipeline, with four GPUs on each machine."""
    nodes = lay_out(Plan(1, pipelines, together=together), lambda *_: ((4, 1),)).node_of
    return [
        [int(nodes[p, s, 0][3]) for s in range(len(one.stages))] for p, one in enumerate(pipelines)
    ]


def test_by_default_the_replicas_of_a_stage_are_side_by_side() -> None:
    assert machines((chain(1, 1, 1, 1),) * 4, None) == [[0, 1, 2, 3]] * 4


def test_pipelines_one_by_one_have_their_stages_side_by_side() -> None:
    assert machines((chain(1, 1, 1, 1),) * 4, 1) == [[p] * 4 for p in range(4)]


def test_pipelines_together_share_machines_stage_by_stage() -> None:
    assert machines((chain(1, 1, 1, 1),) * 4, 2) == [[0, 0, 1, 1]] * 2 + [[2, 2, 3, 3]] * 2
    # As many as there are, or more, are all of them.
    for together in (4, 9):
        assert machines((chain(1, 1, 1, 1),) * 4, together) == [[0, 1, 2, 3]] * 4


def test_only_equal_pipelines_are_placed_together() -> None:
    """Micro batches may differ, stages may not."""
    short, long = chain(2, 2), chain(1, 1, 2)
    more = replace(short, micro_batches=5)
    # In the order of their contents: the one with more layers on its first rank comes later.
    found = machines((short, long, more, long), 2)
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert {*found[0]}.isdisjoint(found[1])


def test_pipelines_one_by_one_need_no_more_machines_than_their_gpus_fill() -> None:
    """Small groups take what larger ones left: 15 GPUs, four machines."""
    found = machines((chain(4, 1),) * 3, 1)
    taken = Counter(number for row in found for number, tp in zip(row, (4, 1), strict=True)
                    for _ in range(tp))  # fmt: skip
    assert len(taken) == 4
    assert max(taken.values()) <= 4


def with_nodes(plan: Plan, layout: MachineLayout) -> Plan:
    """The plan with the machine of each stage as its node."""
    pipelines = []
    for p, pipeline in enumerate(plan.pipelines):
        names = [f"{layout.node_of[p, s, 0][3]:04d}" for s in range(len(pipeline.stages))]
        stages = tuple(
            replace(one, places=(replace(one.place, node=name),))
            for one, name in zip(pipeline.stages, names, strict=True)
        )
        pipelines.append(replace(pipeline, stages=stages))
    return replace(plan, pipelines=tuple(pipelines), together=None)


@pytest.mark.sim
def test_named_nodes_give_the_estimate_of_the_placement(examples: int) -> None:
    """Naming the nodes that the placement chooses changes nothing but names."""
    for seed in range(examples):
        rng = random.Random(f"placement {seed}")
        world = random_world(rng)
        plan = random_plan(rng, world, splits=False, schedules=("1f1b", "gpipe"))
        plan = replace(plan, together=rng.choice([None, 1, 2, 3]))
        by_hand = with_nodes(plan, lay_out(plan, world.estimator.facts.machines))
        ours, theirs = (world.estimator.estimate(one) for one in (plan, by_hand))
        assert theirs.iteration_s == pytest.approx(ours.iteration_s, rel=1e-9), seed


@pytest.mark.sim
def test_the_order_of_pipelines_does_not_matter(examples: int) -> None:
    """Except under ZeRO-1, where it decides between holders that own equally little."""
    for seed in range(examples):
        rng = random.Random(f"placed order {seed}")
        world = random_world(rng)
        if world.job.zero == 1 and world.costs.runtime.zero1_by_bucket:
            continue
        plan = replace(random_plan(rng, world), together=rng.choice([1, 2, 3]))
        order = rng.sample(range(len(plan.pipelines)), len(plan.pipelines))
        shuffled = replace(plan, pipelines=tuple(plan.pipelines[p] for p in order))
        before, after = (world.estimator.estimate(one) for one in (plan, shuffled))
        assert after.iteration_s == pytest.approx(before.iteration_s, rel=1e-9), seed


@pytest.mark.parametrize(
    ("tps", "together", "expected"),
    [
        ((1,) * 9, None, [0, 0, 0, 0, 1, 1, 2, 2, 3]),
        ((2,) * 5, None, [0, 0, 1, 2, 3]),
        ((4, 4, 4), None, [0, 3, 4]),
        ((4, 2, 1, 1), None, [0, 1, 2, 2]),
        ((1, 2, 4, 1), None, [0, 0, 3, 4]),
        ((1, 2, 4, 1), 1, [0, 0, 3, 0]),
    ],
)
def test_machines_of_several_sizes_are_filled_in_turn(
    tps: tuple[int, ...], together: int | None, expected: list[int]
) -> None:
    """A machine of four GPUs, two of two, and then more of four."""
    plan = Plan(1, (chain(*tps),), together=together)
    nodes = lay_out(plan, lambda *_: ((4, 1), (2, 2))).node_of
    assert [nodes[0, s, 0][3] for s in range(len(tps))] == expected
