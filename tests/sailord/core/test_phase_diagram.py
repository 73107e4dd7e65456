"""The diagram at the head of ``sailord.core.decide`` shows every transition between phases."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

from agents.protocol.records import GenerationRecord
from sailord.core import decide
from sailord.core.model.events import JobWriteRejected, NodesObserved, OrderGiven, PlanFound, Ticked
from sailord.core.model.nodes import Nodes
from sailord.core.model.phases import Closing, Held, Stopping
from sailord.core.model.rule import Step
from sailord.core.model.state import State
from tests.sailord.core.states import (
    JOB,
    NOW,
    OPENING,
    QUESTION,
    STARTING,
    STOPPED,
    A,
    B,
    C,
    G,
    durable,
    order,
    parked,
    proposal,
    record,
    state,
)
from tests.sailord.core.test_any_events import Cluster

Transition = tuple[str, str]


def drawn_transitions() -> set[Transition]:
    """Return the transitions of the docstring: ``One, Other -> Third -> Fourth    what for``."""
    assert decide.__doc__ is not None
    found: set[Transition] = set()
    for line in decide.__doc__.splitlines():
        if "->" not in line:
            continue
        transition, _, what_for = re.sub(r"(?<! ) +->", " ->", line.strip()).partition("   ")
        assert what_for, f"it does not say what for: {line}"
        phases = [group.split(", ") for group in transition.split(" -> ")]
        for group, following in pairwise(phases):
            found |= {(one, other) for one in group for other in following}
    return found


BACK = order("rollback", durable=durable(10, 2))
CLOSED: GenerationRecord = replace(G, state="closed")
RARE = (
    (state(Stopping("paused", "lunch", NOW), generation=STOPPED), Ticked(NOW + 60)),
    (replace(parked(40, 40), nodes=Nodes()), NodesObserved(NOW, (record(B),))),
    (state(Closing("held", "it fails"), generation=CLOSED), Ticked(NOW)),
    (state(QUESTION, orders=(BACK,)), PlanFound(NOW, QUESTION.request, proposal())),
    (
        state(replace(QUESTION, before=STARTING), orders=(BACK,)),
        PlanFound(NOW, QUESTION.request, proposal()),
    ),
    (
        state(replace(QUESTION, nodes=(A,), before=STARTING)),
        PlanFound(NOW, QUESTION.request, proposal(A)),
    ),
    (state(Held("it fails", NOW), generation=CLOSED), OrderGiven(NOW, order("resume"))),
    (state(OPENING), JobWriteRejected(NOW, JOB, "it is too long")),
    (state(Held("it fails", NOW), generation=CLOSED), OrderGiven(NOW, order("cancel"))),
)
"""Transitions that random histories hardly reach."""
HISTORIES = 100
FAULTS: tuple[tuple[object, ...], ...] = (
    ("tick", 15.0),
    ("nodes", (A, B)),
    ("nodes", (A, B, C)),
    ("report", B, "failed", 0, ()),
    ("order", "pause", A),
    ("order", "cancel", A),
    ("order", "replan", A),
    ("order", "drain", A),
    ("plan", ()),
    ("plan", (A, B)),
    ("all run", 1),
)


def taken_transitions() -> set[Transition]:
    """Return the transitions that random events, and the rare ones, lead to."""
    found: set[Transition] = set()
    next_step = decide.next_step

    def watched(before: State) -> Step | None:
        step = next_step(before)
        after = before if step is None else step.state
        if before.active is not None and after.active is not None:
            transition = type(before.active.phase).__name__, type(after.active.phase).__name__
            if transition[0] != transition[1]:
                found.add(transition)
        return step

    with patch.object(decide, "next_step", watched):
        for seed in range(HISTORIES):
            _take_random_events(random.Random(seed))
        for before, event in RARE:
            decide.decide(before, event)
    return found


def _take_random_events(chance: random.Random) -> None:
    """Take 40 actions; 70 % are progress, or nothing would ever run."""
    cluster = Cluster()
    for _ in range(40):
        fault = chance.choice(FAULTS)
        for event in cluster.events(("progress",) if chance.random() < 0.7 else fault):
            cluster.feed(event)


def test_diagram_shows_exactly_the_transitions_that_occur() -> None:
    drawn, taken = drawn_transitions(), taken_transitions()
    assert taken - drawn == set(), "not drawn"
    assert drawn - taken == set(), "drawn, but never taken"
