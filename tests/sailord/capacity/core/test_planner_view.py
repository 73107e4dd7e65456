"""What the capacity decisions are told of the active job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import GenerationRecord
from sailord.capacity.core.planner_view import REPLACED_S, agents_of, progress_of
from sailord.core.model.events import GenerationWritten
from sailord.core.model.nodes import Exclusion
from sailord.core.model.phases import Opening
from sailord.core.model.proposal import Proposal
from sailord.core.model.state import State
from sailord.core.queries.generation_record import next_record
from sailord.core.queries.timeouts import stall_s
from tests.sailord.core.states import (
    NOW,
    A,
    C,
    G,
    act,
    active_of,
    node,
    proposal,
    record,
    state,
)

PREDICTED = replace(G, step_s=10.0, predicted_s=10.0)


def reconfigured(offered: Proposal, last: GenerationRecord = PREDICTED) -> State:
    """A job whose steps took 15 s, in its next generation."""
    before = state(generation=last, step_s=15.0)
    record = next_record(before, active_of(before), offered, G.restore, "a reason")
    opening = state(Opening(record, offered), generation=last, step_s=15.0)
    after, _ = act(opening, GenerationWritten(NOW, record))
    return after


@pytest.mark.parametrize(
    ("offered", "step_s"),
    [
        (proposal(iteration_s=10.0), 15.0),
        (proposal(iteration_s=5.0), 7.5),
        (proposal(iteration_s=14.0, plain_s=10.0), 15.0),
    ],
    ids=["the same", "a faster plan", "corrected by running steps"],
)
def test_a_job_that_was_slower_than_predicted_is_slower_under_its_next_plan(offered, step_s):
    after = reconfigured(offered)
    assert active_of(after).progress.step_s == step_s
    assert progress_of(after).slower == 1.5
    assert active_of(after).generation.step_s == max(offered.iteration_s, step_s)
    again = state(generation=active_of(after).generation, step_s=step_s)
    assert progress_of(again).slower == 1.5


def test_the_slowness_of_a_straggler_does_not_outlast_it():
    offered = replace(proposal(iteration_s=11.4), members=("a",))
    before = state(generation=PREDICTED, step_s=15.0)
    record = next_record(before, active_of(before), offered, G.restore, "b is slow")
    opening = state(Opening(record, offered), generation=PREDICTED, step_s=15.0)
    straggler = replace(opening.nodes["b"], exclusion=Exclusion(slow="twice its prediction"))
    opening = replace(opening, nodes=opening.nodes.with_({"b": straggler}))
    after, _ = act(opening, GenerationWritten(NOW, record))
    assert active_of(after).progress.step_s is None
    assert progress_of(after).slower == 1.0


def test_the_leader_calls_a_generation_stuck_before_its_ranks_give_up():
    offered = proposal(iteration_s=40.0)
    before = state(generation=PREDICTED, step_s=40.0)
    record = next_record(before, active_of(before), offered, G.restore, "a reason")
    opening = state(Opening(record, offered), generation=PREDICTED, step_s=40.0)
    after, _ = act(opening, GenerationWritten(NOW, record))
    assert record.step_s == 160.0
    assert record.wait_s > stall_s(after.options, active_of(after))


def test_a_step_is_measured_anew_where_an_earlier_version_kept_no_prediction():
    after = reconfigured(proposal(iteration_s=5.0), replace(PREDICTED, predicted_s=0.0))
    assert active_of(after).progress.step_s is None
    assert progress_of(after).slower == 1.0
    old = state(generation=replace(PREDICTED, predicted_s=0.0), step_s=15.0)
    assert progress_of(old).slower == 1.5


@pytest.mark.parametrize(("ends_s", "is_leaving"), [(7200.0, False), (REPLACED_S, True)])
def test_another_instance_is_requested_a_boot_before_the_job_leaves_an_announced_one(
    ends_s, is_leaving
):
    going = node(C, record=record(C, leaves_at=NOW + ends_s), draining_since=NOW - 9)
    given = state(None, node(A), going, generation=replace(G, members=(A, C), next_move_s=10.0))
    agents, in_use = agents_of(given)
    name = going.record.name
    assert agents[name].is_leaving is is_leaving
    assert name in in_use
    idle = state(None, node(A), going, generation=replace(G, members=(A,), next_move_s=10.0))
    assert agents_of(idle)[0][name].is_leaving, "no job trains there"
