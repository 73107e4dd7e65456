"""When an agent reports, and what."""

from __future__ import annotations

from agents.core.model import GangReported, Options, Ticked
from agents.protocol.records import Fence
from agents.saved_state import SavedState, initial_state
from tests.agents.core.life import JOB, ME, NODE, NOW, SEALED, TERM, act, idle, said, state


def test_a_change_is_reported_at_once_and_in_full() -> None:
    (report,) = said(state(reports=8), GangReported(NOW, 3, "running", 41))
    assert (report.node, report.number, report.heard) == (ME, 9, Fence(TERM, 3))
    assert (report.generation, report.taking, report.step) == (3, "running", 41)
    assert (report.job, report.sealed) == (JOB, SEALED)


def test_an_unchanged_state_is_reported_at_intervals() -> None:
    told, _ = act(state(), GangReported(NOW, 3, "running", 41))
    assert said(told, Ticked(NOW + 0.9)) == []
    (report,) = said(told, Ticked(NOW + 1))
    assert report.number == told.reports + 1


def test_a_report_without_workers_is_idle() -> None:
    (report,) = said(idle(), Ticked(NOW))
    assert (report.generation, report.taking, report.step) == (0, "idle", 0)


def test_report_numbers_grow_over_a_restart_with_the_clock_set_back() -> None:
    kept = SavedState("boot", 1)
    before = initial_state(kept, NODE, Options(), now=NOW)
    after = initial_state(kept, NODE, Options(), now=NOW - 4000)
    assert after.reports >= before.reports
