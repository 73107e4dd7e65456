"""Many notices or losses in a row: one question to the planner, one reconfiguration."""

from __future__ import annotations

import pytest

from agents.protocol.records import NodeId
from sailord.core.model.commands import RequestPlan, WriteGeneration
from sailord.core.model.events import OrderGiven, PlanFound, Ticked
from sailord.core.model.phases import Running, Waiting
from sailord.core.queries.replan_triggers import replan_trigger
from sailord.text.causes import short_cause
from tests.sailord.core.states import (
    BEGAN,
    NOW,
    A,
    B,
    C,
    act,
    active_of,
    generation,
    node,
    order,
    phase,
    proposal,
    report,
    state,
)

NODES = tuple(NodeId(f"n{number:03}.boot.1") for number in range(400))
GO, STAY = NODES[:200], NODES[200:]


@pytest.mark.parametrize("apart_s", [0.0, 0.002], ids=["at once", "one by one"])
def test_two_hundred_notices_cause_one_question_and_one_reconfiguration(apart_s: float) -> None:
    runs = state(
        Running(BEGAN),
        *(node(id_, report(id_)) for id_ in NODES),
        generation=generation(*NODES),
        considered=frozenset(NODES),
    )
    now, ordered = NOW, []
    for id_ in GO:
        now += apart_s
        notice = order("preempt", id_, f"order-{id_}", leaves_at=NOW + 30)
        runs, commands = act(runs, OrderGiven(now, notice))
        ordered += commands
    while now < NOW + 3:
        now += 0.1
        runs, commands = act(runs, Ticked(now))
        ordered += commands
    asked = [each for each in ordered if isinstance(each, RequestPlan)]
    assert [each.nodes for each in asked] == [STAY]
    runs, commands = act(runs, PlanFound(now, asked[0].request, proposal(*STAY)))
    stops = [each for each in commands if isinstance(each, WriteGeneration)]
    assert [each.record.state for each in stops] == ["stopping"]
    assert phase(runs) is not None


def test_a_node_lost_while_the_job_waits_is_a_reason_of_the_next_plan() -> None:
    gone = (node(id_, lost_at=NOW - 1, why_lost="no lease") for id_ in (A, B))
    waits = state(Waiting("machine-a is lost: no lease", NOW - 5), *gone, node(C))
    trigger = replan_trigger(waits, active_of(waits))
    assert trigger is not None
    assert short_cause(trigger.reason) == "machine-a, machine-b lost"
