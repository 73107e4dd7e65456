"""When a rank asks for the inputs of its passes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from simulator.estimate.pass_order import device_orders
from worker.training.pipeline_schedule import requests_of

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("is_early", [False, True])
def test_each_input_is_requested_once_and_before_it_is_taken(schedule, stage, is_early):
    order = device_orders(schedule, stages=3, micro_batches=5)[stage]
    first, after = requests_of(order, is_early=is_early)
    requested = list(first)
    for op, following in zip(order, after, strict=True):
        assert op in requested
        if following is not None:
            requested.append(following)
    assert sorted(map(repr, requested)) == sorted(map(repr, order))


def test_the_next_of_a_kind_is_requested_while_the_other_kind_is_computed():
    order = device_orders("1f1b", stages=3, micro_batches=5)[1]
    first, after = requests_of(order, is_early=True)
    assert [op.kind for op in first] == ["F", "B"]
    pairs = zip(order, after, strict=True)
    assert all(following is None or following.kind == op.kind for op, following in pairs)
