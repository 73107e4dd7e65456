"""When a rank asks for the inputs of its passes."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")

from simulator.estimate.pass_order import Op, device_orders
from worker.training.pipeline_schedule import requests_of

pytestmark = pytest.mark.torch


def by_kind(op):
    return 0 if op.kind == "F" else 2


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("is_early", [False, True])
def test_each_input_is_requested_once_and_before_it_is_taken(schedule, stage, is_early):
    order = device_orders(schedule, stages=3, micro_batches=5)[stage]
    first, after = requests_of(order, is_early=is_early, source_of=by_kind)
    requested = list(first)
    for op, following in zip(order, after, strict=True):
        assert op in requested
        if following is not None:
            requested.append(following)
    assert sorted(map(repr, requested)) == sorted(map(repr, order))


def test_the_next_of_a_kind_is_requested_while_the_other_kind_is_computed():
    order = device_orders("1f1b", stages=3, micro_batches=5)[1]
    first, after = requests_of(order, is_early=True, source_of=by_kind)
    assert [op.kind for op in first] == ["F", "B"]
    pairs = zip(order, after, strict=True)
    assert all(following is None or following.kind == op.kind for op, following in pairs)


def sent(op, *, groups, stages):
    """The device group that the output of a pass goes to, and the pass that takes it."""
    following = Op(op.kind, op.stage + (1 if op.kind == "F" else -1), op.micro_batch)
    if not 0 <= following.stage < stages:
        return None
    return following.stage % groups, following


@pytest.mark.parametrize("groups", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 3, 7])
def test_a_rank_takes_what_another_sends_in_the_order_in_which_it_is_sent(groups, chunks, rounds):
    """A channel keeps the order, and of two device groups one carries activations and gradients."""
    stages = groups * chunks
    orders = device_orders(
        "interleaved" if chunks > 1 else "1f1b",
        stages=stages,
        micro_batches=groups * rounds,
        virtual_stages=chunks,
    )
    for source, target in itertools.permutations(range(groups), 2):
        parcels = [sent(op, groups=groups, stages=stages) for op in orders[source]]
        arriving = [each[1] for each in parcels if each is not None and each[0] == target]
        assert [op for op in orders[target] if op in set(arriving)] == arriving


@pytest.mark.parametrize("device", [0, 1])
def test_of_two_device_groups_the_next_input_is_requested_whatever_its_kind(device):
    order = device_orders("interleaved", stages=6, micro_batches=4, virtual_stages=3)[device]

    def source_of(op):
        return None if op.stage == (0 if op.kind == "F" else 5) else 1 - device

    first, after = requests_of(order, is_early=True, source_of=source_of)
    requested = [*first, *(op for op in after if op is not None)]
    assert requested == [op for op in order if source_of(op) is not None]
    for op, following in zip(order, after, strict=True):
        assert following is None or order.index(following) > order.index(op)
