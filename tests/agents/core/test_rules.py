"""Single rules of agents that nothing else would miss: each was found by breaking it."""

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


def test_a_generation_whose_workers_have_left_it_is_not_gone_back_to() -> None:
    """They wait for the next one; what is read late of the last one names this node still."""
    before = state(ABORTED, record=WITHOUT_US)
    after, _ = act(before, GangReported(NOW, 3, "idle"))
    assert (after.gang, after.left, after.idle_since) == (None, 3, NOW)
    assert act(replace(after, record=None), GenerationRead(NOW, G))[1] == ()


def test_who_leads_is_known_from_an_abort_though_no_workers_are_there() -> None:
    after, _ = act(idle(), AbortReceived(NOW, OTHER, Fence(TERM + 2, 3)))
    assert after.heard == Fence(TERM + 2, 3)


def test_who_is_in_the_store_again_is_cut_off_from_it_no_more() -> None:
    after, _ = act(idle(is_registered=False, store_silent_since=NOW - 5), Registered(NOW, NODE))
    assert (after.is_registered, after.store_silent_since) == (True, None)


def test_that_a_failure_is_the_programs_own_is_told() -> None:
    for is_bug in (True, False):
        reported = GangReported(NOW, 3, "failed", failure="a shape is wrong", is_bug=is_bug)
        exited = GangExited(NOW, 3, "a shape is wrong", is_bug)
        for event in (reported, exited):
            (told,) = said(state(), event)
            assert (told.failure, told.is_bug) == ("a shape is wrong", is_bug)


def test_free_memory_is_no_news_where_none_was_wanting() -> None:
    assert act(state(), FreeMemoryMeasured(NOW, 10))[0].shortage is None
    failed = GangReported(NOW, 3, "failed", failure="a shape is wrong")
    assert act(state(), failed)[0].shortage is None
