"""When a draining node is safe to stop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import JobId, JobState, Point, Restore
from sailord.core.model.events import Ticked
from sailord.core.model.nodes import Node, Nodes
from sailord.core.model.state import State
from sailord.core.queries.drain_status import drained, holders, stuck
from sailord.core.queries.restore_choice import release_now
from tests.sailord.core.states import (
    NOW,
    A,
    B,
    C,
    D,
    act,
    durable,
    generation,
    job,
    node,
    record,
    report,
    state,
)

G4 = generation(A, B, number=4)


def leaving(said: object = None, **others: object) -> Node:
    """It was in the third generation, and is idle."""
    idle = report(C, "idle", step=0, sealed=())
    return node(C, said or idle, draining_since=NOW - 3, **others)  # type: ignore[arg-type] # a report


def after_move(gone: Node, *sealed: int) -> State:
    """The fourth generation runs on ``a`` and ``b``, and has sealed these steps."""
    members = (node(id_, report(id_, step=50, sealed=sealed, of=4)) for id_ in (A, B))
    return state(None, *members, gone, generation=G4)


HOLDS = leaving(report(C, "idle", step=0, sealed=(40,)))


@pytest.mark.parametrize(
    ("now", "is_free"),
    [
        (after_move(leaving(), 50), True),
        (after_move(leaving(report(C, "stopped")), 50), False),
        (after_move(replace(leaving(), report=None), 50), False),
        (after_move(leaving(lost_at=NOW), 50), False),
        (after_move(node(C, report(C, "idle", sealed=())), 50), False),
        (after_move(leaving()), True),
        (after_move(HOLDS, 50), True),
        (after_move(HOLDS), False),
        (after_move(leaving(report(C, "idle", step=0, sealed=(60,))), 50), True),
        (after_move(leaving(report(C, "idle", step=0, sealed=(50,), of=4)), 50), False),
        (replace(after_move(leaving(), 50), active=None), True),
    ],
    ids=[
        "idle",
        "works",
        "unheard",
        "lost",
        "stays",
        "idle, no step yet",
        "old state",
        "only state",
        "void state",
        "a second copy",
        "no job",
    ],
)
def test_drained_node_is_safe_once_nothing_on_it_is_needed(now: State, is_free: bool) -> None:
    assert drained(now) == (frozenset({C}) if is_free else frozenset())


def test_member_is_not_safe_before_the_next_generation_opens() -> None:
    idle = node(B, report(B, "idle", sealed=()), draining_since=NOW)
    assert drained(state(None, node(A), idle)) == frozenset()


@pytest.mark.parametrize(
    ("of", "kept", "is_free"),
    [("paused", None, False), ("paused", 39, False), ("paused", 40, True), ("done", None, True)],
)
def test_snapshots_of_a_waiting_job_are_needed(
    of: JobState, kept: int | None, is_free: bool
) -> None:
    other = JobId("other")
    holds = leaving(report(C, "idle", step=0, sealed=(40,), job=other))
    now = after_move(holds, 50).with_job(job(id=other, state=of))
    if kept is not None:
        now = replace(now, durables={other: durable(kept)})
    assert drained(now) == (frozenset({C}) if is_free else frozenset())


def test_member_of_a_closed_generation_is_safe() -> None:
    over = state(None, node(A), leaving(), generation=generation(A, C, state="closed"))
    assert drained(over) == frozenset({C})


@pytest.mark.parametrize(("of", "is_free"), [(4, False), (2, True)], ids=["newest", "old"])
def test_newest_step_is_needed_though_older_ones_than_the_restore_point_are_released(
    of: int, is_free: bool
) -> None:
    """The fourth generation has ended; two nodes have the point from which it began."""
    ended = replace(
        generation(A, B, C, number=4, state="closed"), restore=Restore(Point(40, 3), "memory")
    )
    others = (node(id_, report(id_, "idle", sealed=(40,))) for id_ in (A, B))
    alone = leaving(report(C, "idle", sealed=(41,), of=of))
    now = state(None, *others, alone, generation=ended)
    assert release_now(now) == Point(40, 3)
    assert drained(now) == (frozenset({C}) if is_free else frozenset())
    assert (C in holders(now)) != is_free


def test_snapshots_of_an_unknown_job_are_not_needed() -> None:
    ghost = leaving(report(C, "idle", step=0, sealed=(40,), job=JobId("ghost")))
    assert drained(after_move(ghost, 50)) == frozenset({C})


def test_no_draining_node_means_none_is_safe() -> None:
    assert drained(replace(state(), nodes=Nodes({D: node(D)}))) == frozenset()


@pytest.mark.parametrize(
    ("others", "of", "is_stuck"),
    [
        ((), {}, True),
        ((node(B),), {}, False),
        ((), {"state": "closed"}, False),
        ((node(B, draining_since=NOW - 1),), {"number": 3}, True),
    ],
    ids=["the last node", "another may serve", "nothing runs", "the other drains, too"],
)
def test_a_drain_that_no_other_node_can_end_is_stuck(
    others: tuple[Node, ...], of: dict[str, object], is_stuck: bool
) -> None:
    member = node(A, draining_since=NOW - 3)
    before = state(None, member, *others, generation=generation(A, **of))  # type: ignore[arg-type] # fields of the record
    now, _ = act(before, Ticked(NOW))
    assert (A in stuck(now)) == is_stuck
    assert B not in stuck(now)


def test_a_drain_is_not_stuck_before_the_job_has_to_leave_the_node() -> None:
    member = node(A, record=record(A, leaves_at=NOW + 3600), draining_since=NOW - 3)
    for move_s, is_stuck in ((10.0, False), (None, True)):
        before = state(None, member, generation=generation(A, next_move_s=move_s))
        now, _ = act(before, Ticked(NOW))
        active = now.active
        assert active is not None
        refused = replace(active.asked, nodes=frozenset(), is_refused=True)
        now = replace(now, active=replace(active, asked=refused))
        assert (A in stuck(now)) == is_stuck
