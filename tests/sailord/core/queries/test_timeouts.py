"""Time limits keep their order whatever a step takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sailord.core.model.events import Ticked
from sailord.core.model.options import Options
from sailord.core.model.phases import Waiting
from sailord.core.model.state import Active
from sailord.core.queries import timeouts
from sailord.core.queries.generation_record import next_record
from tests.sailord.core.states import (
    NOW,
    G,
    act,
    active_of,
    phase,
    proposal,
    state,
)

OPTIONS = Options()
SECONDS = st.floats(0.0, 1e5)


def running(predicted_s: float, measured_s: float | None = None) -> Active:
    active = state(generation=replace(G, step_s=predicted_s), step_s=measured_s).active
    assert active is not None
    return active


@given(SECONDS, st.none() | SECONDS, SECONDS)
def test_rank_waits_longer_than_the_leader(step_s: float, measured_s: float | None, move_s: float):
    before = running(0.0, measured_s)
    offered = proposal(iteration_s=step_s, move_s=move_s)
    taken_s = timeouts.step_of(before, offered)
    wait_s = timeouts.wait_s(OPTIONS, offered, taken_s)
    then = running(taken_s)
    scaled_s = timeouts.scaled_step_s(before, step_s)
    assert max(step_s, (measured_s or 0.0) if scaled_s is None else scaled_s) == taken_s
    assert taken_s < timeouts.stop_s(OPTIONS, then)
    assert 20 * taken_s <= timeouts.stall_s(OPTIONS, then) < wait_s
    assert timeouts.start_s(OPTIONS, offered) < wait_s, "must exceed the slowest peer's fetch time"
    measured = running(step_s, scaled_s or measured_s)
    assert timeouts.stall_s(OPTIONS, measured) <= timeouts.stall_s(OPTIONS, then)


def test_record_carries_the_wait_time():
    before = state()
    slow = proposal(iteration_s=100.0, move_s=10.0)
    record = next_record(before, active_of(before), slow, G.restore, "a reason")
    assert (record.step_s, record.wait_s) == (100.0, 4000.0)


@pytest.mark.parametrize(("step_s", "limit_s"), [(0.5, 120), (6.0, 120), (10.0, 200)])
def test_slow_steps_do_not_count_as_stuck(step_s: float, limit_s: int):
    record = replace(G, step_s=step_s)
    due, _ = act(state(generation=record, advanced_at=NOW - limit_s), Ticked(NOW))
    assert phase(due) == Waiting(f"no step was done for {limit_s} s", NOW)
    early = state(generation=record, advanced_at=NOW - limit_s + 0.1)
    assert act(early, Ticked(NOW))[0] == replace(early, now=NOW)
