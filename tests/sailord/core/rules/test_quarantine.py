"""Nodes whose bits were contradicted are left out until an operator uncordons them."""

from __future__ import annotations

from typing import Any

import pytest

from agents.protocol.records import NodeId, Order
from sailord.core.decide import decide
from sailord.core.model.commands import GiveOrder, Note, RequestPlan
from sailord.core.model.events import Elected, OrderGiven, PlanFound, Reported, Ticked
from sailord.core.model.phases import Running, Stopping, Waiting
from sailord.core.model.state import State
from sailord.core.queries.replan_triggers import why_no_node
from tests.sailord.core.states import (
    BEGAN,
    JOB,
    NOW,
    A,
    B,
    C,
    D,
    act,
    active_of,
    generation,
    node,
    order,
    phase,
    proposal,
    record,
    report,
    state,
)

ALL = (A, B, C, D)
G = generation(*ALL)
DIFFERS = "piece 2 of layer 7 differs, and most contradict rank 1 on node b"
WHY = f"its bits were contradicted ({DIFFERS}); `sailorctl uncordon machine-b` returns it"
MARK = Order("bits-b-job-3", "quarantine", B, reason=WHY, wrong_bits=True)


def failed(by: NodeId, *contradicted: NodeId, **others: Any) -> Reported:
    said = {"number": 6, "failure": f"rank 0: {DIFFERS}", "is_bug": True, **others}
    return Reported(NOW, report(by, "failed", contradicted=contradicted, **said))


def four(**others: Any) -> State:
    known = {"considered": frozenset(ALL), "generation": G, **others}
    return state(None, *map(node, ALL), **known)


def test_contradicted_node_is_left_out_and_the_failure_does_not_count():
    after, commands = decide(four(), failed(A, B))
    assert GiveOrder(MARK) in commands
    assert Note(f"machine-b is quarantined: {WHY}", JOB, is_transition=True) in commands
    assert isinstance(phase(after), Waiting)
    assert active_of(after).attempts.failures == 0, "the node explains it"
    asked, commands = act(after, Ticked(NOW + 1))
    (question,) = (each for each in commands if isinstance(each, RequestPlan))
    assert question.nodes == (A, C, D)
    # Each of the others reports the same.
    again, commands = decide(asked, failed(C, B, number=7))
    assert not [each for each in commands if isinstance(each, GiveOrder)]
    assert again.nodes[B] == asked.nodes[B]


def test_any_number_of_contradicted_nodes_is_decided_about_at_once():
    """A wrong driver on a third of a hundred replicas names them all in one report."""
    many = [NodeId(f"n{number:03}") for number in range(100)]
    known = state(None, *map(node, many), considered=frozenset(many), generation=generation(*many))
    _, commands = decide(known, failed(many[0], *many[60:]))
    assert sum(isinstance(each, GiveOrder) for each in commands) == 25
    said = [each.text for each in commands if isinstance(each, Note)]
    assert sum("the software may be at fault" in text for text in said) == 15


def test_node_stays_out_under_a_new_leader_until_it_is_uncordoned():
    elected = Elected(
        NOW + 5,
        9,
        nodes=tuple(map(record, ALL)),
        jobs=(four().job,),
        generations=(G,),
        orders=(MARK,),
    )
    led, _ = decide(State(), elected)
    assert led.nodes[B].exclusion.wrong_bits == WHY
    led, _ = decide(led, failed(A, B, number=8))
    back, _ = decide(led, OrderGiven(NOW + 6, order("uncordon", B, "order-7")))
    assert back.nodes[B].exclusion.wrong_bits == ""
    assert back.nodes[B].is_usable(is_member=False)
    # What was reported of that generation is over.
    late, commands = decide(back, failed(C, B, number=9))
    assert late.nodes[B].exclusion.wrong_bits == ""
    assert not [each for each in commands if isinstance(each, GiveOrder)]


def test_no_rule_ends_a_quarantine_and_the_job_shows_why_it_waits():
    marked = node(B, wrong_bits=WHY)
    waiting = state(Waiting("it failed", NOW - 60), marked, generation=generation(B))
    after, commands = decide(waiting, Ticked(NOW))
    assert after.nodes[B].exclusion.wrong_bits == WHY
    assert why_no_node(after) == f"no node is ready: machine-b: {WHY}"
    assert why_no_node(after) in [each.text for each in commands if isinstance(each, Note)]


def test_one_node_may_be_left_out_and_no_more_than_a_quarter():
    one = decide(four(), failed(A, B))[0]
    two, commands = decide(one, failed(C, B, D, number=7))
    assert two.nodes[D].exclusion.wrong_bits == ""
    told = [each.text for each in commands if isinstance(each, Note)]
    assert [text for text in told if text.startswith("machine-d stays although")]
    _, commands = decide(two, failed(D, B, D, number=8))
    assert not [e for e in commands if isinstance(e, Note) and "stays although" in e.text]


@pytest.mark.parametrize("of", [2, 4])
def test_reports_of_other_generations_and_of_unknown_nodes_mark_no_node(of: int):
    after, _ = decide(four(), failed(A, B, of=of))
    assert not after.nodes[B].exclusion.wrong_bits
    stranger, _ = decide(state(None, node(A), node(B), node(C)), failed(A, C))
    assert not stranger.nodes[C].exclusion.wrong_bits


def test_member_that_was_chosen_before_it_was_marked_is_replaced():
    nodes = (node(A), node(B, wrong_bits=WHY), node(C), node(D))
    running = state(Running(BEGAN), *nodes, considered=frozenset(ALL), generation=G)
    asked, commands = act(running, Ticked(NOW))
    (question,) = (each for each in commands if isinstance(each, RequestPlan))
    assert question.nodes == (A, C, D)
    after, _ = act(asked, PlanFound(NOW, asked.requests, proposal(A, C, D)))
    assert isinstance(phase(after), Stopping)
    assert phase(after).reason == "machine-b is quarantined"
