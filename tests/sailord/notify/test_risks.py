"""A budget or a deadline at risk is told once, and named as long as it lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

from agents.protocol.records import (
    FIRST,
    Bill,
)
from agents.protocol.store_keys import Keys
from agents.store.interface import Put, WriteRejected
from sailord.cluster_records import Gateway
from sailord.core.model.commands import Note
from sailord.core.model.phases import Running
from sailord.core.model.state import Progress, State
from sailord.notify import announcer
from tests.sailord.core.states import (
    BEGAN,
    JOB,
    NOW,
    STARTING,
    generation,
    job,
    state,
)
from tests.sailord.notify.published import Published


def costly(usd_max: float = 100.0) -> State:
    """A job that has a thousand steps of 3.6 s to go, at $1,000 an hour."""
    record = job(steps=1_040, bill=Bill(usd=5.0, until=NOW, usd_max=usd_max), deadline=NOW + 1800)
    runs = generation(restore=FIRST, usd_per_hour=1000.0)
    return state(Running(BEGAN), job=record, generation=runs, progress=Progress(40, NOW, 3.6))


def test_a_risk_is_reported_once_and_kept_in_the_history() -> None:
    published, now = Published(), costly()
    for _ in range(2):
        published.announcer.observe(now, now)
    (said,) = published.texts("budget_at_risk")
    assert said.startswith("budget at risk: at its present speed it will cost $1,005.00")
    assert len(published.texts("deadline_at_risk")) == 1
    assert {*published.announcer.outbox.at_of} == {"job.budget_at_risk", "job.deadline_at_risk"}
    stored = [published.announcer._lines.get_nowait() for _ in range(2)]
    for _, _, (put,) in stored:  # The message is stored with the line, and names the risk once.
        assert '"text":"at its present speed' in put.value.decode().replace(": ", ":")
    # A new leader knows it from the history, though the message was deleted long ago.
    later = Published()
    later.announcer.restore(JOB, [line for _, line, _ in stored])
    later.announcer.observe(state(Running(BEGAN)), now)
    assert later.texts("budget_at_risk") == [said], "restored, with its kind, and not told again"
    assert not later.announcer.outbox.at_of


def test_a_risk_is_named_as_long_as_it_lasts_also_after_a_rollback_and_a_change_of_leader() -> None:
    published, now = Published(), costly()
    published.announcer.observe(now, now)
    young = replace(now, active=replace(now.active, progress=Progress(1, NOW, 3.6)))
    moving = replace(young, active=replace(young.active, phase=STARTING))
    later = Published()
    lines = [published.announcer._lines.get_nowait()[1] for _ in range(2)]
    later.announcer.restore(JOB, lines)
    for told in (published, later):
        for each in (young, moving):
            assert told.announcer.risks(each).keys() == {"budget_at_risk", "deadline_at_risk"}
    assert Published().announcer.risks(young) == {}, "a first alarm needs a trusted speed"


def test_a_risk_outlasts_a_thousand_lines_that_wait_for_the_store() -> None:
    """It is told once only, so that its message must not go."""
    published, now = Published(), costly()
    published.announcer.observe(now, now)
    for number in range(announcer.WAITING_MAX):
        note = Note(f"line {number}", JOB, is_transition=True)
        published.announcer.note(note, now, "Tick", NOW)
    lines = published.announcer._lines
    kept = [lines.get_nowait() for _ in range(lines.qsize())]
    assert len(kept) == announcer.WAITING_MAX
    assert [bool(put) for _, _, put in kept[:3]] == [True, True, False]
    assert kept[2][1].text == "line 2", "the oldest others went"


async def test_the_message_of_a_line_that_the_store_rejects_is_stored_alone() -> None:
    published, now, stored = Published(), costly(), list[object]()

    class Rejecting:
        """A store that takes no line of the history."""

        async def snapshot(self, _prefix: str) -> SimpleNamespace:
            return SimpleNamespace(entries=())

        async def transact(self, _checks: object, operations: Sequence[Put]) -> None:
            if any("/history/" in each.key for each in operations):
                raise WriteRejected("too long")
            stored.extend(each.key for each in operations)

    telling = published.announcer
    telling.gateway = Gateway(Rejecting(), Keys("test"))  # type: ignore[arg-type] # it suffices
    telling.observe(now, now)
    work = asyncio.create_task(telling.run())
    async with asyncio.timeout(20):
        while len(stored) < 2:
            await asyncio.sleep(0)
    work.cancel()
    assert [str(key).rpartition("/")[2] for key in stored] == [
        "job.budget_at_risk",
        "job.deadline_at_risk",
    ]


def test_a_message_of_a_risk_that_was_sent_is_not_sent_again_with_the_line() -> None:
    published, now = Published(), costly()
    published.announcer.outbox.at_of |= {"job.budget_at_risk": 1.0, "job.deadline_at_risk": 1.0}
    published.announcer.observe(now, now)
    assert [published.announcer._lines.get_nowait()[2] for _ in range(2)] == [(), ()]


def test_a_deadline_that_instances_are_rented_for_is_announced_once_by_capacity() -> None:
    now = costly()
    assert Published().announcer.risks(now).keys() == {"budget_at_risk", "deadline_at_risk"}
    published = Published(keeps_deadline=lambda job: job == JOB)
    assert published.announcer.risks(now).keys() == {"budget_at_risk"}
    for _ in range(2):
        published.announcer.tell_deadline(JOB, "it will be late", now, is_at_risk=True)
    assert published.texts("deadline_at_risk") == ["deadline at risk: it will be late"]
    assert published.texts("transition") == ["it will be late"], "the second time it is no news"
