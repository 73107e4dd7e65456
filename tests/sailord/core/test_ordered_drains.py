"""A drain that was ordered ends by an order only, and is about the node that had the name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sailord.core.model.commands import GiveOrder
from sailord.core.model.events import Elected, NodesObserved, OrderGiven
from tests.sailord.core.states import NOW, A, B, G, act, changed, job, node, order, record, state


def test_a_drain_that_was_ordered_outlives_a_notice_that_ends_and_a_restarted_agent() -> None:
    """Somebody may be about to unplug the machine."""
    drained, _ = act(state(), OrderGiven(NOW, order("drain", B, "unplug")))
    leaving = record(B, state="draining", leaves_at=NOW + 30)
    warned, _ = act(drained, NodesObserved(NOW + 1, (record(A), leaving)))
    calm, _ = act(warned, NodesObserved(NOW + 2, (record(A), record(B))))
    assert calm.nodes[B].exclusion.draining_since == NOW
    ended = replace(order("withdraw", B, "notice-withdrawn"), of_notice=True)
    calm, _ = act(calm, OrderGiven(NOW + 3, ended))
    assert calm.nodes[B].exclusion.draining_since == NOW
    back, _ = act(calm, OrderGiven(NOW + 4, order("withdraw", B, "by hand")))
    assert back.nodes[B].exclusion.draining_since is None


def test_a_notice_that_ends_takes_back_what_it_began() -> None:
    warned, _ = act(state(), OrderGiven(NOW, order("preempt", B, "notice")))
    ended = replace(order("withdraw", B, "notice-withdrawn"), of_notice=True)
    calm, _ = act(warned, OrderGiven(NOW + 1, ended))
    assert calm.nodes[B].exclusion.draining_since is None


@pytest.mark.parametrize("why", ["it is not known", "it is lost"])
def test_a_notice_for_a_node_that_is_gone_takes_no_later_one_of_that_name(why: str) -> None:
    """A cloud may tell of a preemption after the node left; a group makes its name again."""
    before = state(None, node(A))
    if why == "it is lost":
        before = state(None, node(A), changed(node(B), lost_at=NOW - 1))
    notice = order("preempt", "machine-b")
    _, commands = act(before, OrderGiven(NOW, notice))
    stored = [each.order for each in commands if isinstance(each, GiveOrder)] or [notice]
    there = (record(A), record(B))
    took = Elected(NOW + 60, 9, nodes=there, jobs=(job(),), generations=(G,), orders=(*stored,))
    led, _ = act(state(), took)
    assert led.nodes[B].exclusion.draining_since is None
