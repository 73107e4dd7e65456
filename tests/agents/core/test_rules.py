"""Rules that no other test covers; each test fails when its rule is broken."""

from __future__ import annotations

from dataclasses import replace

from agents.core.model import (
    AbortReceived,
    FreeMemoryMeasured,
    GangExited,
    GangReported,
    GenerationRead,
    Registered,
)
from agents.protocol.records import Fence
from tests.agents.core.life import NODE, NOW, OTHER, PEER, RUNS, TERM, G, act, idle, said, state

ABORTED = replace(RUNS, abort_sent_at=NOW)
WITHOUT_US = replace(G, number=4, members=(PEER,))


def test_a_generation_that_the_workers_left_is_not_joined_again() -> None:
    """A late read of the old record still names this node."""
    before = state(ABORTED, record=WITHOUT_US)
    after, _ = act(before, GangReported(NOW, 3, "idle"))
    assert (after.gang, after.left, after.idle_since) == (None, 3, NOW)
    assert act(replace(after, record=None), GenerationRead(NOW, G))[1] == ()


def test_an_abort_raises_the_term_even_without_workers() -> None:
    after, _ = act(idle(), AbortReceived(NOW, OTHER, Fence(TERM + 2, 3)))
    assert after.heard == Fence(TERM + 2, 3)


def test_a_registration_ends_the_silence_of_the_store() -> None:
    after, _ = act(idle(is_registered=False, store_silent_since=NOW - 5), Registered(NOW, NODE))
    assert (after.is_registered, after.store_silent_since) == (True, None)


def test_a_report_says_whether_a_failure_is_a_bug() -> None:
    for is_bug in (True, False):
        reported = GangReported(NOW, 3, "failed", failure="a shape is wrong", is_bug=is_bug)
        exited = GangExited(NOW, 3, "a shape is wrong", is_bug)
        for event in (reported, exited):
            (told,) = said(state(), event)
            assert (told.failure, told.is_bug) == ("a shape is wrong", is_bug)


def test_free_memory_without_a_shortage_changes_nothing() -> None:
    assert act(state(), FreeMemoryMeasured(NOW, 10))[0].shortage is None
    failed = GangReported(NOW, 3, "failed", failure="a shape is wrong")
    assert act(state(), failed)[0].shortage is None
