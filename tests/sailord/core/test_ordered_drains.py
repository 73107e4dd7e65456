"""A drain that was ordered ends by an order only."""

from __future__ import annotations

from dataclasses import replace

from sailord.core.model.events import NodesObserved, OrderGiven
from tests.sailord.core.states import NOW, A, B, act, order, record, state


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
