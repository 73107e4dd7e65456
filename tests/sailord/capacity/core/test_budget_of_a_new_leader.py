"""What a new leader makes of the record of the last one, before it has seen what is rented."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sailord.capacity.core.budget import spent_usd
from sailord.capacity.core.decide import record_of
from sailord.capacity.core.model import (
    Agent,
    AgentsCounted,
    CapacityPolicy,
    CapacityRecord,
    DeleteInstances,
    JobProgress,
    PauseJob,
    PricesRead,
    ProgressSeen,
    TargetSet,
    Tick,
)
from tests.sailord.capacity.core.story import FIRST, A, B, Story, instance


def _books_with_an_open_request() -> CapacityRecord:
    """What a sailord stored that has an instance in use, and went off after it asked for three."""
    story = Story(CapacityPolicy(usd_max=1000.0)).hear(PricesRead(0.0, DEAR)).see(1.0, EARLIER)
    story.hear(AgentsCounted(2.0, {"n9": Agent(4)}, frozenset({"n9"})))
    assert story.hear(TargetSet(3.0, {A: 3, B: 1})).asks() == [(A, 3)]
    return record_of(story.state)


DEAR, EARLIER = {A: 90.0, B: 7.2}, instance(9, B, request="earlier", at=0.0)
LATER = 3.9 * 3600


def test_a_request_that_made_nothing_while_nobody_led_spends_no_budget():
    story = Story(CapacityPolicy(usd_max=1000.0), _books_with_an_open_request(), LATER)
    assert (story.state.stop, story.orders) == ("", ())
    story.see(LATER + 10.0, EARLIER)
    story.hear(AgentsCounted(LATER + 11.0, {"n9": Agent(4)}, frozenset({"n9"})))
    assert set(story.state.asks) == {FIRST}
    story.see(LATER + 120.0, EARLIER)
    assert story.state.asks == {}
    assert (story.state.stop, story.of(DeleteInstances), story.of(PauseJob)) == ("", [], [])
    assert spent_usd(story.state) == pytest.approx((LATER + 120.0) / 500)


def test_what_a_request_made_while_nobody_led_costs_from_its_creation():
    story = Story(CapacityPolicy(usd_max=1000.0), _books_with_an_open_request(), LATER)
    story.see(LATER + 10.0, EARLIER, *(instance(number, at=10.0) for number in range(3)))
    assert spent_usd(story.state) == pytest.approx(3 * 90 * 3.9 + (LATER + 10.0) / 500)
    assert story.state.stop == "ended"


def test_an_instance_that_ended_while_nobody_led_ends_no_budget():
    policy = CapacityPolicy(usd_max=10.0)
    books = record_of(Story(policy).see(11.0, instance()).state)
    story = Story(policy, books, LATER)  # $14, had it stayed.
    assert story.see(LATER + 10.0, ended_at={"1": 1010.0}).state.stop == ""
    assert spent_usd(story.state) == pytest.approx(1.0)


def test_a_request_in_a_zone_that_is_not_seen_spends_no_budget():
    story = Story(CapacityPolicy(usd_max=1000.0), _books_with_an_open_request(), 20.0)
    for minute in range(1, 240):
        story.see(60.0 * minute, EARLIER, unseen_zones=(A.zone,))
    assert set(story.state.asks) == {FIRST}
    assert story.state.stop == ""


def test_a_job_is_paused_where_the_budget_may_be_spent_and_nobody_says_what_is_rented():
    policy = CapacityPolicy(usd_max=10.0)
    books = record_of(Story(policy).see(11.0, instance()).state)
    story = Story(policy, books, LATER)  # $14, if it stayed.
    story.hear(ProgressSeen(LATER + 1.0, JobProgress("j", 0.0, 5, 100, None, is_running=True)))
    paused = []
    for second in range(2, 400, 10):
        story.hear(AgentsCounted(LATER + second, {"n1": Agent(4)}, frozenset({"n1"})))
        paused += story.of(PauseJob)
    assert len(paused) == 1
    assert story.state.stop == ""
    assert story.see(LATER + 410.0, ended_at={"1": 1010.0}).state.stop == ""


def test_a_job_that_begins_after_a_stop_is_paused_also_while_the_provider_is_silent():
    policy = CapacityPolicy(usd_max=10.0)
    books = record_of(Story(policy).see(11.0, instance()).state)
    books = replace(books, stop="parting", stopped_at_usd=10.0)
    story = Story(policy, books, LATER)
    story.hear(ProgressSeen(LATER + 1.0, JobProgress("j", 0.0, 5, 100, None, is_running=True)))
    story.hear(AgentsCounted(LATER + 2.0, {"n1": Agent(4)}, frozenset({"n1"})))
    assert len(story.of(PauseJob)) == 1


def test_a_clock_that_was_set_back_puts_off_no_deletion_and_no_doubt():
    story = Story(books=_books_with_an_open_request(), at=3600.0).see(3610.0, EARLIER)
    story.hear(AgentsCounted(3611.0, {"n9": Agent(4)})).hear(TargetSet(3612.0, {}))
    assert story.hear(Tick(3612.0 + 300.0)).of(DeleteInstances) == [DeleteInstances(("9",))]
    back = Story(books=record_of(story.state), at=400.0)
    assert back.see(410.0, EARLIER).of(DeleteInstances) == []
    assert back.hear(Tick(430.0)).of(DeleteInstances) == [DeleteInstances(("9",))]
    assert set(back.state.asks) == {FIRST}
    assert back.see(521.0, EARLIER).state.asks == {}
