"""How long the restore point waits for survivors that still seal their state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agents.protocol.records import Point, Sealing
from sailord.core.model.commands import WriteGeneration
from sailord.core.model.events import PlanFound, Reported, Ticked
from sailord.core.model.nodes import Node
from sailord.core.model.state import State
from sailord.core.queries.sealing import awaits_seals
from tests.sailord.core.states import (
    FROM_NOTHING,
    NOW,
    A,
    B,
    G,
    act,
    active_of,
    durable,
    node,
    order,
    proposal,
    report,
    state,
)

LONG = replace(G, step_s=10.0)
"""Of 10 s a step: that is what a wait may cost for each step that it saves."""
SEALS = Sealing(41, 4.0)


def survivor(sealing: Sealing | None = SEALS, **others: Any) -> Node:
    """A node that announced a seal 1 s ago, and reported 0.5 s ago."""
    said = report(A, step=41, broken_peers=(B,), sealing=sealing)
    return node(A, said, **{"sealing_since": NOW - 1, **others})


def after_loss(a: Node, **others: Any) -> State:
    """The other node is lost, and the planner is asked for a plan on the survivor."""
    question = replace(FROM_NOTHING, nodes=(A,))
    lost = node(B, lost_at=NOW - 0.5)
    return state(question, a, lost, **{"generation": LONG, "step": 41, **others})


def is_awaited(of: State, *, after_s: float = 0.0) -> bool:
    return awaits_seals(replace(of, now=NOW + after_s), active_of(of))


PLAN = PlanFound(NOW, 4, proposal(A))


def test_next_generation_begins_from_the_step_that_survivors_sealed():
    waiting, commands = act(after_loss(survivor()), PLAN)
    assert commands == ()
    ready = report(A, "broken", step=41, sealed=(40, 41), number=6)
    _, commands = act(waiting, Reported(NOW + 3, ready))
    (written,) = [each for each in commands if isinstance(each, WriteGeneration)]
    assert written.record.restore.point == Point(41, 3)


def test_withdrawn_announcement_ends_the_wait():
    waiting, _ = act(after_loss(survivor()), PLAN)
    failed = report(A, "broken", step=41, number=6)
    _, commands = act(waiting, Reported(NOW + 1, failed))
    (written,) = [each for each in commands if isinstance(each, WriteGeneration)]
    assert written.record.restore.point == Point(40, 3)


def test_wait_ends_although_the_announcer_hangs():
    waiting, _ = act(after_loss(survivor()), PLAN)
    told = report(A, step=41, broken_peers=(B,), sealing=SEALS, number=6)
    waiting, commands = act(waiting, Reported(NOW + 6.5, told))
    assert commands == ()
    _, commands = act(waiting, Ticked(NOW + 7.0))
    assert any(isinstance(each, WriteGeneration) for each in commands)


def test_without_an_announced_seal_nothing_is_awaited():
    _, commands = act(after_loss(survivor(None, sealing_since=None)), PLAN)
    assert any(isinstance(each, WriteGeneration) for each in commands)


@pytest.mark.parametrize(
    ("sealing", "step_s", "memory_every", "waits_s"),
    [
        (SEALS, 10.0, 1, 8.0),
        (Sealing(41, 8.0), 10.0, 1, 10.0),
        (Sealing(41, 11.0), 10.0, 1, 0.0),
        (Sealing(41, 6.0), 10.0, 40, 10.0),
        (Sealing(41, 11.0), 10.0, 50, 22.0),
        (Sealing(41, 0.01), 10.0, 1, 1.0),
        (Sealing(41, 0.9), 0.01, 1, 1.0),
        (Sealing(41, 1.1), 0.01, 1, 0.0),
        (Sealing(9000, 90.0), 10.0, 1, 0.0),
        (Sealing(10, 4.0), 10.0, 1, 0.0),
    ],
    ids=[
        "twice the announced time",
        "at most what the step costs again",
        "not at all if the step is done again sooner",
        "the snapshot before is one step back",
        "the snapshot before is the restore point",
        "at least a second, since steps may be shorter than a message takes",
        "a second also if a step is shorter",
        "not if both are more than a second and a step is shorter",
        "a step far ahead counts as the next one",
        "a step that is older than the restore point saves nothing",
    ],
)
def test_wait_is_bounded(
    sealing: Sealing, step_s: float, memory_every: int, waits_s: float
) -> None:
    record = replace(G, step_s=step_s, memory_every=memory_every)
    says = report(A, step=41, sealing=sealing)
    # Anchored at the first announcement, whatever is repeated since.
    before = state(
        None, node(A, says, sealing_since=NOW, heard_at=NOW + 100), node(B), generation=record,
        step=41,
    )  # fmt: skip
    if waits_s:
        assert is_awaited(before, after_s=waits_s - 0.001)
    assert not is_awaited(before, after_s=waits_s)


def test_wait_follows_the_measured_step_if_that_is_longer():
    before = after_loss(survivor(), generation=G, step_s=10.0)
    assert is_awaited(before)


@pytest.mark.parametrize(
    "change",
    [
        {"lost_at": NOW},
        {"unreachable_since": NOW},
        {"absent_since": NOW - 1, "unreachable_since": NOW},
        {"heard_at": NOW - 3},
    ],
    ids=["lost", "unreachable", "silent", "no report for three intervals"],
)
def test_survivor_without_a_fresh_report_is_not_awaited(change: dict[str, Any]) -> None:
    assert is_awaited(after_loss(survivor()))
    assert not is_awaited(after_loss(survivor(**change)))


def test_survivor_without_a_lease_is_awaited_while_it_reports():
    assert is_awaited(after_loss(survivor(absent_since=NOW - 1)))


def test_seal_of_another_generation_is_not_awaited():
    other = report(A, step=41, of=2, sealing=SEALS)
    assert not is_awaited(after_loss(node(A, other, sealing_since=NOW - 1)))


def test_rollback_awaits_no_seal():
    rollback = order("rollback", durable=durable(20))
    assert not is_awaited(after_loss(survivor(), orders=(rollback,)))


def test_repeated_announcements_do_not_prolong_the_wait():
    before = state(None, node(A, report(A)), node(B), generation=LONG, step=41)
    later = before
    for number, at in enumerate((NOW, NOW + 2, NOW + 5), start=6):
        said = None if number == 7 else SEALS  # Withdrawn once, and announced again.
        told = report(A, step=41, broken_peers=(B,), sealing=said, number=number)
        later, _ = act(later, Reported(at, told))
    assert later.nodes[A].workers.sealing_since == NOW
