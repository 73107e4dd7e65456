"""When a rank asks for the inputs of its passes."""

from __future__ import annotations

import itertools

import pytest

from simulator.estimate.pass_order import Op, device_orders
from worker.training.input_requests import maker_of, requests_of


def by_kind(op):
    return 0 if op.kind == "F" else 2


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_each_input_is_requested_once_and_before_it_is_taken(schedule, stage):
    orders = device_orders(schedule, stages=3, micro_batches=5)
    first, after = requests_of(orders, stage, is_early=True, source_of=by_kind)
    requested = list(first)
    for op, following in zip(orders[stage], after, strict=True):
        assert op in requested
        if following is not None:
            requested.append(following)
    assert sorted(map(repr, requested)) == sorted(map(repr, orders[stage]))


def ancestors(orders, op):
    """Return the passes that have to be done before the input of a pass is there."""
    before = dict(pair[::-1] for order in orders for pair in itertools.pairwise(order))
    everything = set(itertools.chain(*orders))
    found, left = set(), [maker_of(op)]
    while left:
        each = left.pop()
        if each in everything and each not in found:
            found.add(each)
            left += [maker_of(each)] + ([before[each]] if each in before else [])
    return found


CASES = [
    (schedule, groups, micro_batches, chunks)
    for schedule, chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3))
    for groups in range(2, 6)
    for micro_batches in range(1, 7)
    if chunks == 1 or micro_batches % groups == 0
]


@pytest.mark.parametrize(("schedule", "groups", "micro_batches", "chunks"), CASES)
def test_nothing_is_requested_before_a_pass_that_it_depends_on(
    schedule, groups, micro_batches, chunks
):
    """The request would hold a part of the GPU until the pass is done, which may wait for it."""
    orders = device_orders(
        schedule,
        stages=groups * chunks,
        micro_batches=micro_batches,
        virtual_stages=chunks,
    )
    for group, order in enumerate(orders):
        first, after = requests_of(orders, group, is_early=False, source_of=by_kind)
        assert first == (order[0],)
        assert after[-1] is None
        for op, following, requested in zip(order, order[1:], after, strict=False):
            depends = op in ancestors(orders, following)
            assert requested == (None if depends else following)


def test_steady_1f1b_requests_each_next_input_during_a_pass():
    orders = device_orders("1f1b", stages=4, micro_batches=8)
    for group, order in enumerate(orders):
        _, after = requests_of(orders, group, is_early=False, source_of=by_kind)
        assert after == (*order[1:], None)


def test_the_last_forward_pass_of_gpipe_ends_before_a_gradient_is_requested():
    """Its memory has its peak there: the allocator may wait for all that the device does."""
    orders = device_orders("gpipe", stages=2, micro_batches=3)
    _, after = requests_of(orders, 0, is_early=False, source_of=by_kind)
    assert [op.kind if op else None for op in after] == ["F", "F", None, "B", "B", None]


def test_the_next_of_a_kind_is_requested_while_the_other_kind_is_computed():
    orders = device_orders("1f1b", stages=3, micro_batches=5)
    first, after = requests_of(orders, 1, is_early=True, source_of=by_kind)
    assert [op.kind for op in first] == ["F", "B"]
    pairs = zip(orders[1], after, strict=True)
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
    orders = device_orders("interleaved", stages=6, micro_batches=4, virtual_stages=3)
    order = orders[device]

    def source_of(op):
        return None if op.stage == (0 if op.kind == "F" else 5) else 1 - device

    first, after = requests_of(orders, device, is_early=True, source_of=source_of)
    requested = [*first, *(op for op in after if op is not None)]
    assert requested == [op for op in order if source_of(op) is not None]
    for op, following in zip(order, after, strict=True):
        assert following is None or order.index(following) > order.index(op)
