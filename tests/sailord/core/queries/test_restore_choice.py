"""A job whose turn has come again waits until nodes tell what they hold of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import Durable, JobId, Order, Point
from sailord.core.model.nodes import Node
from sailord.core.model.phases import Waiting
from sailord.core.model.state import State
from sailord.core.queries.restore_choice import (
    holders_reported,
    newer_in_memory,
    resume_point,
)
from tests.sailord.core.states import (
    JOB,
    NOW,
    A,
    B,
    active_of,
    changed,
    generation,
    job,
    node,
    report,
)
from tests.sailord.core.states import state as state_of

OTHER = JobId("other")


def about(id_, job) -> Node:
    return node(id_, replace(report(id_), job=job))


def back(*nodes: Node, since: float = NOW, state: str = "closed") -> State:
    last = generation(A, B, state=state)
    return state_of(Waiting("next in the queue", since), *nodes, generation=last)


def has_heard(state: State) -> bool:
    return holders_reported(state, active_of(state))


def test_a_report_about_another_job_is_awaited_as_missing():
    assert not has_heard(back(about(A, JOB), about(B, OTHER)))
    assert has_heard(back(about(A, JOB), about(B, JOB)))
    assert has_heard(back(about(A, JOB), about(B, None)))


def test_a_node_of_another_job_is_awaited_for_turn_s():
    stays = about(A, JOB), about(B, OTHER)
    wait_s = back(*stays).options.turn_s
    assert not has_heard(back(*stays, since=NOW - wait_s + 0.1))
    assert has_heard(back(*stays, since=NOW - wait_s))


def test_a_lost_node_is_not_awaited():
    lost = changed(about(B, OTHER), lost_at=NOW, why_lost="it is gone")
    assert has_heard(back(about(A, JOB), lost))


@pytest.mark.parametrize("state", ["open", "stopping"])
def test_after_a_loss_no_node_of_another_job_is_awaited(state):
    """A node may train a job that this store does not know: it delays no recovery."""
    assert has_heard(back(about(A, JOB), about(B, OTHER), state=state))


def test_a_paused_job_goes_on_from_its_newest_whole_state_or_where_a_rollback_leads():
    paused = job(state="paused")
    known = State(
        nodes=state_of(None, node(A), node(B)).nodes,
        jobs={JOB: paused},
        generations={JOB: generation(A, B, state="closed")},
    )
    assert resume_point(known, JOB) == Point(40, 3)
    assert newer_in_memory(known, JOB) == 40
    gone = replace(known, nodes=State().nodes)
    assert resume_point(gone, JOB) == Point(0, 0)
    durable = Durable(Point(30, 3), "m", "0" * 64)
    assert resume_point(replace(gone, durables={JOB: durable}), JOB) == durable.point
    assert newer_in_memory(replace(gone, durables={JOB: durable}), JOB) is None
    rollback = Order("1", "rollback", JOB, durable=replace(durable, point=Point(20, 2)))
    assert resume_point(replace(known, rollbacks={JOB: rollback}), JOB) == Point(20, 2)
