"""A job whose turn has come again waits until nodes tell what they hold of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import JobId
from sailord.core.model.nodes import Node
from sailord.core.model.phases import Waiting
from sailord.core.model.state import State
from sailord.core.queries.restore_choice import holders_reported
from tests.sailord.core.states import JOB, NOW, A, B, active_of, changed, generation, node, report
from tests.sailord.core.states import state as state_of

OTHER = JobId("other")


def about(id_, job) -> Node:
    return node(id_, replace(report(id_), job=job))


def back(*nodes: Node, since: float = NOW, state: str = "closed") -> State:
    last = generation(A, B, state=state)
    return state_of(Waiting("its turn came", since), *nodes, generation=last)


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
