"""Of nodes that a plan could use and does not: why, and when the planner looks at them next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sailord.core.model.commands import RequestPlan
from sailord.core.model.events import PlanFound, Ticked
from sailord.core.model.phases import Running, Waiting
from sailord.core.queries.idle_nodes import idle_nodes
from tests.sailord.core.states import (
    FROM_NOTHING,
    NOW,
    QUESTION,
    STARTING,
    WAITING,
    A,
    B,
    C,
    D,
    act,
    active_of,
    generation,
    node,
    proposal,
    state,
)

NODES = node(A), node(B), node(C)
KNOWN = frozenset((A, B, C))


def test_hurried_plan_that_leaves_nodes_idle_is_soon_followed_by_a_question_for_all() -> None:
    """After a loss one of two pipelines was dropped; its other nodes could do more."""
    question = replace(FROM_NOTHING, nodes=(A, B, C))
    hurried = proposal(A, B, ask_again_s=30.0)
    after, _ = act(state(question, *NODES, considered=KNOWN), PlanFound(NOW, 4, hurried))
    asked = active_of(after).asked
    before = state(Running(NOW), *NODES, asked=asked, generation=generation(number=4))
    told = "the plan does without it; all nodes are planned for again in 30 s"
    assert idle_nodes(before) == {C: told}
    later, commands = act(before, Ticked(NOW + 29.9))
    assert commands == ()
    _, (request,) = act(later, Ticked(NOW + 30.0))
    assert isinstance(request, RequestPlan)
    assert (request.nodes, request.is_urgent) == ((A, B, C), False)


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (state(None, *NODES, considered=KNOWN, considered_at=NOW), "planned for again in 600 s"),
        (state(None, *NODES, node(D, since=NOW - 10)), "not planned for yet; all nodes are"),
        (state(None, *NODES, node(D, since=NOW - 10)), "again in 20 s"),
        (state(replace(QUESTION, nodes=(A, B, C)), *NODES), "is being looked for now"),
        (
            state(
                None,
                node(A),
                node(B, draining_since=NOW - 99),
                node(C),
                is_refused=True,
                considered=frozenset((A, C)),
                considered_at=NOW - 1,
            ),
            "planned for again in 599 s",
        ),
        (state(STARTING, *NODES), "again once the present generation runs"),
    ],
)
def test_idle_node_has_a_reason_and_the_next_question(before, told) -> None:
    assert told in idle_nodes(before)[C]


@pytest.mark.parametrize(
    "before",
    [
        state(WAITING, *NODES),
        state(None, *NODES[:2]),
        state(None, *NODES[:2], node(C, is_cordoned=True)),
        replace(state(None, *NODES), active=None),
        state(Waiting("next in the queue", NOW), *NODES, generation=None),
    ],
)
def test_no_reason_where_nothing_runs_or_no_plan_may_use_the_node(before) -> None:
    assert idle_nodes(before) == {}
