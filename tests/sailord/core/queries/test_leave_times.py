"""The job leaves members whose end is announced in time: not at once, and not too late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.move_policy.leave_time import RESERVE_S
from sailord.core.model.commands import RequestPlan
from sailord.core.model.events import OrderGiven, PlanFound, Ticked
from sailord.core.model.phases import Running, Stopping
from sailord.core.model.state import Progress, State
from sailord.core.node_lifecycle import observe_nodes
from sailord.core.queries.leave_times import leaves_from, left_later
from sailord.core.queries.reconfiguration_timing import follow
from sailord.core.queries.what_next import what_next
from tests.sailord.core.states import (
    BEGAN,
    NOW,
    A,
    B,
    C,
    G,
    act,
    active_of,
    node,
    order,
    phase,
    proposal,
    record,
    report,
    state,
)

OFTEN = replace(G, members=(A, B, C), next_move_s=10.0)
"""A generation with steps of 0.5 s that can be left within 10 s."""
ENDS_AT = NOW + 600
LEFT_AT = ENDS_AT - 10 - 0.5 - RESERVE_S


def with_notice(ends_at: float | None = ENDS_AT, **facts: object) -> State:
    """The job runs on three nodes, and the end of the third is announced."""
    going = node(C, record=record(C, leaves_at=ends_at), draining_since=NOW - 9, **facts)
    return state(None, node(A), node(B), going, generation=OFTEN)


def test_a_member_is_left_when_the_move_must_begin() -> None:
    given = with_notice()
    assert left_later(given, active_of(given)) == {C: LEFT_AT}
    after, commands = act(given, Ticked(NOW))
    assert (phase(after), commands) == (Running(BEGAN), ())
    assert what_next(after).question_at <= LEFT_AT + given.options.notices_gather_s
    due_at = LEFT_AT + given.options.notices_gather_s
    early = replace(given, active=replace(active_of(given), progress=_stepping(given, due_at)))
    _, commands = act(early, Ticked(due_at - 0.1))
    assert not [each for each in commands if isinstance(each, RequestPlan)]
    asking, (*_, asked) = act(early, Ticked(due_at))
    assert isinstance(asked, RequestPlan)
    assert (asked.nodes, asked.slow) == ((A, B), {})
    assert active_of(asking).question.is_forced


def _stepping(given: State, at: float) -> Progress:
    """Progress at a later moment, so that the job is not stuck."""
    return replace(active_of(given).progress, advanced_at=at)


@pytest.mark.parametrize(
    "given",
    [
        with_notice(None),
        with_notice(NOW + 30),
        with_notice(is_drain_ordered=True),
        with_notice(yields_since=NOW - 9),
    ],
    ids=["no end is known", "it goes soon", "an operator drains it", "it goes to another job"],
)
def test_others_are_left_at_once(given: State) -> None:
    assert left_later(given, active_of(given)) == {}
    assert leaves_from(active_of(given), given.nodes[C]) == NOW - 9
    _, (asked,) = act(given, Ticked(NOW))
    assert isinstance(asked, RequestPlan)


def test_the_earliest_of_several_notices_counts() -> None:
    """In whatever order they come, and also after a new record of the node."""
    soon, late = (order("preempt", C, f"in {s}", leaves_at=NOW + s) for s in (60, 3600))
    nodes = record(A), record(B), record(C, state="draining", leaves_at=NOW + 3600)
    given = state(None, node(A), node(B), node(C), generation=OFTEN)
    for orders in (soon,), (soon, late), (late, soon):
        after = observe_nodes(given, nodes)
        for each in orders:
            after, _ = act(after, OrderGiven(NOW, each))
        after = observe_nodes(after, nodes)
        assert after.nodes[C].record.leaves_at == NOW + 60
        assert left_later(after, active_of(after)) == {C: NOW + 60 - 10 - 0.5 - RESERVE_S}


def test_a_member_is_left_at_once_if_another_notice_names_no_end() -> None:
    """For example, its agent is stopped, or an alert fires, while the node is announced."""
    given = state(None, node(A), node(B), node(C), generation=OFTEN)
    given, _ = act(given, OrderGiven(NOW, order("preempt", C, leaves_at=ENDS_AT)))
    assert left_later(given, active_of(given))
    nodes = record(A), record(B), record(C, state="draining")
    stopped = observe_nodes(given, nodes)
    alerted, _ = act(given, OrderGiven(NOW, order("preempt", C, "alert")))
    for after in stopped, alerted:
        assert after.nodes[C].record.leaves_at == ENDS_AT
        assert leaves_from(active_of(after), after.nodes[C]) == NOW
    resolved, _ = act(alerted, OrderGiven(NOW, order("withdraw", C, "resolved")))
    assert resolved.nodes[C].exclusion == node(C).exclusion


def test_a_generation_that_was_stored_without_the_time_of_a_move_leaves_at_once() -> None:
    given = with_notice()
    old = replace(active_of(given), generation=replace(OFTEN, next_move_s=None))
    assert left_later(replace(given, active=old), old) == {}


def test_a_better_plan_is_judged_against_going_on_with_the_member() -> None:
    """The question about a new node leaves the announced one out, and need not be followed."""
    fresh = replace(node("d", report("d", "idle")), since=NOW - 60)
    given = with_notice()
    given = replace(given, nodes=given.nodes.with_({"d": fresh}))
    asking, (asked,) = act(given, Ticked(NOW))
    assert isinstance(asked, RequestPlan)
    assert (asked.nodes, asked.slow) == ((A, B, "d"), {C: 1.0})
    stays, _ = act(asking, PlanFound(NOW, asked.request, proposal(A, B, "d", is_worth_it=False)))
    assert phase(stays) == Running(BEGAN)
    moves, _ = act(asking, PlanFound(NOW, asked.request, proposal(A, B, "d")))
    assert isinstance(phase(moves), Stopping)


def test_a_plan_that_an_operator_orders_need_not_leave_the_member_yet() -> None:
    asking, (_, asked) = act(with_notice(), OrderGiven(NOW, order("replan")))
    assert isinstance(asked, RequestPlan)
    assert (asked.nodes, asked.slow) == ((A, B), {C: 1.0})
    stays, _ = act(asking, PlanFound(NOW, asked.request, proposal(A, B, is_worth_it=False)))
    assert phase(stays) == Running(BEGAN)


def test_two_members_are_left_together_when_the_first_has_to_be() -> None:
    other = node(B, record=record(B, leaves_at=ENDS_AT + 300), draining_since=NOW - 9)
    given = with_notice()
    given = replace(given, nodes=given.nodes.with_({B: other}))
    assert left_later(given, active_of(given)) == {B: LEFT_AT + 300, C: LEFT_AT}
    due_at = LEFT_AT + given.options.notices_gather_s
    given = replace(given, active=replace(active_of(given), progress=_stepping(given, due_at)))
    _, (*_, asked) = act(given, Ticked(due_at))
    assert isinstance(asked, RequestPlan)
    assert asked.nodes == (A,)


def test_a_notice_counts_as_the_cause_of_a_move_from_when_the_member_had_to_be_left() -> None:
    given = with_notice()
    due_at = LEFT_AT + given.options.notices_gather_s
    given = replace(given, active=replace(active_of(given), progress=_stepping(given, due_at)))
    asking, _ = act(given, Ticked(due_at))
    under_way, _ = follow(None, given, asking)
    assert (under_way.kind, under_way.sign_at) == ("notice", LEFT_AT)


def test_a_job_that_waits_leaves_no_node_later() -> None:
    given = with_notice()
    over = replace(active_of(given), generation=replace(OFTEN, state="closed"))
    assert left_later(given, over) == {}
