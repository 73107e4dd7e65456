"""A job leaves announced nodes as late as its move allows."""

from __future__ import annotations

from planner.move_policy.leave_time import RESERVE_S, leave_at_s


def test_the_step_the_move_and_the_reserve_end_before_the_nodes_do() -> None:
    assert leave_at_s(3600.0, move_s=300.0, step_s=10.0) == 3600 - 300 - 10 - RESERVE_S


def test_a_notice_of_30_s_leaves_no_time_to_wait() -> None:
    assert leave_at_s(30.0, move_s=0.0, step_s=0.0) <= 0
    assert leave_at_s(120.0, move_s=10.0, step_s=5.0) > 60
