"""Exponential backoff."""

from __future__ import annotations

from agents.daemon.backoff import Backoff


def test_pauses_double_up_to_the_limit_and_start_again_after_a_reset():
    backoff = Backoff(0.3, 1.0)
    assert [backoff.next_s() for _ in range(4)] == [0.3, 0.6, 1.0, 1.0]
    backoff.reset()
    assert backoff.next_s() == 0.3
