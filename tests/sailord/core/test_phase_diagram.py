"""The diagram at the head of ``sailord.core.decide`` shows every transition between phases."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

from agents.protocol.records import GenerationRecord
from sailord.core import decide
from sailord.core.model.events import NodesObserved, OrderGiven, PlanFound, Ticked
from sailord.core.model.nodes import Nodes
from sailord.core.model.phases import Closing, Held, Stopping
from sailord.core.model.rule import Step
from sailord.core.model.state import State
from tests.sailord.core.states import (
    NOW,
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
from tests.sailord.core.test_any_events import Play

Way = tuple[str, str]


def drawn() -> set[Way]:
    """The ways in the docstring: ``One, Other -> Third -> Fourth, Fifth    what it is for``."""
    assert decide.__doc__ is not None
    found: set[Way] = set()
    for line in decide.__doc__.splitlines():
        if "->" not in line:
            continue
        way, _, what_for = re.sub(r"(?<! ) +->", " ->", line.strip()).partition("   ")
        assert what_for, f"it does not say what for: {line}"
        phases = [group.split(", ") for group in way.split(" -> ")]
        for group, following in pairwise(phases):
            found |= {(one, other) for one in group for other in following}
    return found


BACK = order("rollback", durable=durable(10, 2))
CLOSED: GenerationRecord = replace(G, state="closed")
SELDOM = (
    (state(Stopping("paused", "lunch", NOW), generation=STOPPED), Ticked(NOW + 60)),
    (replace(parked(40, 40), nodes=Nodes()), NodesObserved(NOW, (record(B),))),
    (state(Closing("held", "it fails"), generation=CLOSED), Ticked(NOW)),
    (state(QUESTION, orders=(BACK,)), PlanFound(NOW, QUESTION.request, proposal())),
    (
        state(replace(QUESTION, before=STARTING), orders=(BACK,)),
        PlanFound(NOW, QUESTION.request, proposal()),
    ),
    (state(Held("it fails", NOW), generation=CLOSED), OrderGiven(NOW, order("resume"))),
    (state(Held("it fails", NOW), generation=CLOSED), OrderGiven(NOW, order("cancel"))),
)
"""Transitions that random histories hardly reach."""
LIVES = 100
WRONG: tuple[tuple[object, ...], ...] = (
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


def lived() -> set[Way]:
    """The ways that the controller goes whatever happens to it."""
    found: set[Way] = set()
    next_step = decide.next_step

    def watched(before: State) -> Step | None:
        step = next_step(before)
        after = before if step is None else step.state
        if before.active is not None and after.active is not None:
            way = type(before.active.phase).__name__, type(after.active.phase).__name__
            if way[0] != way[1]:
                found.add(way)
        return step

    with patch.object(decide, "next_step", watched):
        for seed in range(LIVES):
            _live(random.Random(seed))
        for before, event in SELDOM:
            decide.decide(before, event)
    return found


def _live(chance: random.Random) -> None:
    """Most goes well, or nothing would ever come to run."""
    play = Play()
    for _ in range(40):
        wrong = chance.choice(WRONG)
        for event in play.events(("goes on",) if chance.random() < 0.7 else wrong):
            play.feed(event)


def test_diagram_shows_exactly_the_transitions_that_occur() -> None:
    shown, gone = drawn(), lived()
    assert gone - shown == set(), "not drawn"
    assert shown - gone == set(), "drawn, but never taken"
