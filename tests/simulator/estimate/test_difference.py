"""The error bar of a difference counts what two plans do differently, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from simulator.estimate.difference import (
    OTHER_SHAPE,
    OTHER_TP,
    REPEATED,
    are_told_apart,
    difference_error,
)
from simulator.spec.plan import Pipeline, Place, Plan, Stage

A100, V100 = Place("A100-40", "a100", "zone"), Place("V100-16", "v100", "zone")


def plan_of(*stages: Stage, micro_batch: int = 2, pipelines: int = 2) -> Plan:
    return Plan(micro_batch, (Pipeline(4, stages),) * pipelines)


HALVES = Stage((0, 4), 1, (A100,)), Stage((4, 8), 1, (A100,))
BASE = plan_of(*HALVES)


def error(one: Plan, other: Plan) -> float:
    found = difference_error(one, other, one_error=0.3, other_error=0.4)
    assert difference_error(other, one, one_error=0.4, other_error=0.3) == pytest.approx(found)
    return found


@pytest.mark.parametrize(
    "other",
    [
        BASE,
        plan_of(*HALVES, pipelines=7),
        replace(BASE, together=1),
        plan_of(Stage((0, 3), 1, (A100,)), Stage((3, 8), 1, (A100,))),
        plan_of(*(replace(s, places=(replace(A100, zone="far"),)) for s in HALVES)),
    ],
)
def test_pipelines_of_the_same_shape_share_their_errors(other: Plan) -> None:
    assert error(BASE, other) == pytest.approx(REPEATED)


@pytest.mark.parametrize(
    "other",
    [
        plan_of(*HALVES, micro_batch=4),
        plan_of(Stage((0, 8), 1, (A100,))),
        plan_of(*(replace(stage, recompute="full") for stage in HALVES)),
    ],
)
def test_other_shapes_add_to_the_error(other: Plan) -> None:
    assert error(BASE, other) == pytest.approx(math.hypot(REPEATED, OTHER_SHAPE))


def test_another_tp_degree_counts_for_the_layers_that_it_runs() -> None:
    other = plan_of(HALVES[0], replace(HALVES[1], tp=2))
    assert error(BASE, other) == pytest.approx(math.hypot(REPEATED, OTHER_TP / 2))


def test_recomputed_layers_count_by_themselves() -> None:
    some = plan_of(replace(HALVES[0], recompute=3), HALVES[1])
    assert error(BASE, some) == pytest.approx(math.hypot(REPEATED, OTHER_SHAPE * 3 / 8))
    fewer = plan_of(replace(HALVES[0], recompute=2), HALVES[1])
    assert error(fewer, some) == pytest.approx(math.hypot(REPEATED, OTHER_SHAPE / 8))


def test_kinds_of_gpus_have_independent_errors() -> None:
    other = plan_of(HALVES[0], replace(HALVES[1], places=(V100,)))
    assert error(BASE, other) == pytest.approx(math.hypot(REPEATED, 0.5 / 2))
    # A quarter of each micro batch on the other kind.
    split = replace(HALVES[1], places=(A100, V100), split=(3, 1))
    assert error(BASE, plan_of(HALVES[0], split)) == pytest.approx(math.hypot(REPEATED, 0.5 / 8))


def test_plans_differ_only_beyond_the_error_bar() -> None:
    assert not are_told_apart(1.0, 1.05, 0.05)
    assert not are_told_apart(1.05, 1.0, 0.05)
    assert are_told_apart(1.0, 1.051, 0.05)
    assert not are_told_apart(0.0, 0.0, 0.05)
