"""What sailord tells whoever follows, from what became of its state."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agents.protocol.store_keys import Keys
from agents.store import EmbeddedStore, StoreUnavailable
from sailord.cluster_records import Gateway
from sailord.core.commands import Note
from sailord.core.phases import Running, Starting
from sailord.core.reconfiguration_timing import ReconfigurationTiming
from sailord.notify import announcer
from sailord.notify.announcer import Teller
from sailord.notify.feed import Feed
from sailord.notify.outbox import Outbox
from tests.sailord.core.standing import (
    BEGAN,
    G4,
    NOW,
    QUESTION,
    A,
    B,
    Planning,
    changed,
    proposal,
    state,
)


class Voice:
    """A teller whose words are kept."""

    def __init__(self) -> None:
        gateway = Gateway(None, Keys("test"))  # type: ignore[arg-type] # nothing is written here
        self.teller = Teller(gateway, Feed(), Outbox(gateway))

    def told(self, kind: str) -> list[str]:
        return [each.text for each in self.teller.feed.kept if each.kind == kind]


STARTS, RUNS = state(Starting(NOW - 1, NOW + 30, 1.0)), state(Running(BEGAN))
ASKS = state(replace(QUESTION, before=Running(BEGAN), is_forced=False))


def test_a_generation_that_goes_on_after_a_question_is_told_of_once() -> None:
    voice = Voice()
    for before, after in ((STARTS, RUNS), (RUNS, ASKS), (ASKS, RUNS), (RUNS, ASKS)):
        voice.teller.look(before, after)
    assert voice.told("generation_running") == ["generation 3 runs"]


def test_a_generation_about_which_is_asked_at_once_is_told_of_too() -> None:
    voice = Voice()
    voice.teller.look(STARTS, ASKS)
    assert voice.told("generation_running") == ["generation 3 runs"]


def test_the_next_generation_is_told_of() -> None:
    voice = Voice()
    voice.teller.look(RUNS, state(Running(NOW), generation=G4))
    assert voice.told("generation_running") == ["generation 4 runs"]


def test_one_that_was_closed_before_a_pause_does_not_open_again_with_its_job() -> None:
    voice = Voice()
    paused = replace(RUNS, active=None)
    closed = state(Running(NOW), generation=replace(G4, state="closed"))
    voice.teller.look(paused, closed)
    assert voice.told("generation_opened") == []
    voice.teller.look(paused, state(Running(NOW), generation=G4))
    assert len(voice.told("generation_opened")) == 1


def test_a_question_while_it_starts_does_not_tell_that_it_runs() -> None:
    voice = Voice()
    asks = Planning(4, (A, B), "b leaves", True, NOW + 9, STARTS.active.phase, proposal())  # type: ignore[union-attr, arg-type] # it starts
    voice.teller.look(STARTS, state(asks))
    assert voice.told("generation_running") == []


def test_each_machine_that_is_lost_is_told_of_once_though_no_plan_is_made_for_it() -> None:
    voice = Voice()
    node = ASKS.nodes[B]
    lost = replace(ASKS, nodes=ASKS.nodes.with_({B: changed(node, lost_at=NOW, why_lost="gone")}))
    voice.teller.look(ASKS, lost)
    heard = replace(lost.nodes[B], heard_at=NOW)
    voice.teller.look(lost, replace(lost, nodes=lost.nodes.with_({B: heard})))
    assert voice.told("node_lost") == ["machine-b is lost: gone"]


MOVE = ReconfigurationTiming(
    1, NOW, "start", "", is_planned=False, source="start", restored_step=0, steps_lost=0,
    downtime_s=0.0, total_s=10.19, predicted_s=0.0, phases=(("plan", 9.0),),
)  # fmt: skip


def test_a_start_is_told_as_one_and_a_move_with_what_it_lost() -> None:
    voice = Voice()
    moved = replace(MOVE, generation=2, kind="loss", downtime_s=3.0, steps_lost=1, predicted_s=2.5)
    for move in (MOVE, moved):
        voice.teller._tell_move(move, RUNS.active.job, RUNS)  # type: ignore[union-attr] # it has a job
    assert voice.told("note") == [
        "generation 1 trains, 10.19 s after it could be planned: plan 9.00 s",
        "generation 2 trains, 3.00 s lost and 1 step (predicted 2.50 s): plan 9.00 s",
    ]


@dataclass
class Away:
    """A store that does not take the first writes."""

    store: EmbeddedStore
    refusals: int

    async def transact(self, *said: Any) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise StoreUnavailable("as the test wants it")
        return await self.store.transact(*said)

    async def snapshot(self, prefix: str) -> Any:
        return await self.store.snapshot(prefix)


@pytest.mark.asyncio
async def test_history_waits_for_a_store_that_is_away_and_outlives_its_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "PAUSE_S", 0.001)
    monkeypatch.setattr(announcer, "PAUSE_S_MAX", 0.002)
    store = await EmbeddedStore.open(tmp_path / "store")
    gateway = Gateway(Away(store, refusals=20), Keys("test"))  # type: ignore[arg-type] # its half
    teller = Teller(gateway, Feed(), Outbox(gateway))
    job = RUNS.active.job  # type: ignore[union-attr] # it has a job
    # Nobody holds the term of these lines any more.
    for text in ("a rank failed", "no plan"):
        teller.note(Note(text, job, is_transition=True), RUNS, "Reported", NOW)
    task = asyncio.create_task(teller.run())
    async with asyncio.timeout(20):
        while len(await gateway.read_history(job)) < 2:
            await asyncio.sleep(0.01)
    assert [line.text for line in await gateway.read_history(job)] == ["a rank failed", "no plan"]
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await store.close()
