"""Which reports are sent at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import Fence, Holding, JobId, NodeId, Point, Report, Sealed, Sealing
from agents.report_sender import is_worth_sending


def sealed(step: int) -> tuple[Sealed, ...]:
    return (Sealed(Point(step, 3), (Holding(0, 0, 1),)),)


HEARD = Report(
    NodeId("a.1"), 5, Fence(1, 3), 3, "running", 40, sealed(40), job=JobId("j"), loss=2.0
)
STEP = replace(HEARD, number=6, step=41, loss=1.9, tokens_per_s=8.0, stall_s=0.1)


def test_a_step_alone_sends_no_report():
    assert is_worth_sending(HEARD, None)
    assert not is_worth_sending(STEP, HEARD)


@pytest.mark.parametrize(
    "change",
    [
        {"taking": "stopped"},
        {"taking": "failed", "failure": "no memory"},
        {"broken_peers": (NodeId("b.1"),)},
        {"generation": 4},
        {"sealing": Sealing(41, 4.0)},
        {"trouble": "the buddy is full"},
        {"unlogged": "WandB is not used any more"},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("with_seals", [True, False])
def test_changes_that_a_leader_acts_on_are_reported_at_any_interval(change, with_seals):
    assert is_worth_sending(replace(STEP, **change), HEARD, with_seals=with_seals)


def test_a_sealed_snapshot_sends_a_report_unless_reports_are_rare():
    fresh = replace(STEP, sealed=sealed(41))
    assert is_worth_sending(fresh, HEARD)
    assert not is_worth_sending(fresh, HEARD, with_seals=False)
    parked = replace(fresh, taking="stopped")  # The leader waits for this point.
    assert is_worth_sending(replace(parked, sealed=sealed(42)), parked, with_seals=False)
