"""The agent and workers that seal their state after a loss."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.core.model import Command, Event, Gang, GangReported, KillGang, State, Ticked
from agents.protocol.records import Sealing
from tests.agents.core.life import FAILED, G4, NOW, aborted, act, said, state

SEALS, ENDLESS = Sealing(40, 4.0), Sealing(40, 1e9)


ROWS: list[tuple[str, State, Event, Gang | None, tuple[Command, ...]]] = [
    (
        "workers that seal after a loss have twice the announced time",
        state(replace(aborted(NOW - 7.9), sealing=SEALS, sealing_since=NOW - 7.9), record=G4),
        GangReported(NOW, 3, "running", 40, sealing=SEALS),
        replace(aborted(NOW - 7.9), sealing=SEALS, sealing_since=NOW - 7.9),
        (),
    ),
    (
        "workers that seal for longer are killed, whatever they announce since",
        state(replace(aborted(NOW - 7), sealing=SEALS, sealing_since=NOW - 8), record=G4),
        GangReported(NOW, 3, "running", 40, sealing=SEALS),
        replace(aborted(NOW - 7), sealing=SEALS, sealing_since=NOW - 8, kill_sent_at=NOW),
        (KillGang(3),),
    ),
    (
        "no announcement puts off the kill by more than ten minutes",
        state(replace(aborted(NOW - 9), sealing=ENDLESS, sealing_since=NOW - 600), record=G4),
        Ticked(NOW),
        replace(aborted(NOW - 9), sealing=ENDLESS, sealing_since=NOW - 600, kill_sent_at=NOW),
        (KillGang(3),),
    ),
    (
        "once they have sealed, abort_s counts again",
        state(replace(aborted(NOW - 3), sealing=SEALS, sealing_since=NOW - 3), record=G4),
        GangReported(NOW, 3, "running", 40),
        replace(aborted(NOW - 3), sealing_since=NOW - 3, kill_sent_at=NOW),
        (KillGang(3),),
    ),
    (
        "the others of a failed gang seal their state",
        state(replace(FAILED, abort_sent_at=NOW - 1)),
        GangReported(NOW, 3, "running", 40, sealing=SEALS),
        replace(FAILED, abort_sent_at=NOW - 1, sealing=SEALS, sealing_since=NOW),
        (),
    ),
]


@pytest.mark.parametrize(
    ("before", "event", "then", "orders"),
    [row[1:] for row in ROWS],
    ids=[row[0] for row in ROWS],
)
def test_decision(
    before: State, event: Event, then: Gang | None, orders: tuple[Command, ...]
) -> None:
    after, commands = act(before, event)
    assert after.gang == then
    assert commands == orders


def test_seal_is_reported_until_the_workers_have_sealed() -> None:
    sealing, _ = act(state(), GangReported(NOW, 3, "running", 40, sealing=SEALS))
    assert said(sealing, Ticked(NOW + 1))[0].sealing == SEALS
    sealed, _ = act(sealing, GangReported(NOW + 2, 3, "broken", 40))
    assert said(sealed, Ticked(NOW + 3))[0].sealing is None
