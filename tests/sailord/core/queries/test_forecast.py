"""Whether a job's budget or its deadline is at risk at its present speed."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import FIRST, Bill
from sailord.core.model.state import Progress
from sailord.core.queries.forecast import BUDGET, DEADLINE, at_risk, seconds_left
from tests.sailord.core.states import (
    NOW,
    RUNNING,
    STARTING,
    STOPPING,
    WAITING,
    A,
    generation,
    job,
    node,
)
from tests.sailord.core.states import state as state_of


def forecast(*, step=100, steps: int | None = 1_100, phase=RUNNING, known=(), step_s=3.6, **about):
    """A job with 1,000 steps of 3.6 s to go: one hour, at $10 an hour."""
    state = state_of(phase, node(A), job=job(steps=steps, **about))
    runs = generation(restore=FIRST, usd_per_hour=10.0, step_s=4.0)
    active = replace(state.active, generation=runs, progress=Progress(step, NOW, step_s))
    return at_risk(replace(state, active=active), known)


def test_seconds_left_are_those_of_the_steps_that_are_not_done():
    state = state_of(RUNNING, node(A), job=job(steps=1_100))
    progress = Progress(100, NOW, 3.6)
    active = replace(state.active, generation=generation(restore=FIRST), progress=progress)
    assert seconds_left(replace(state, active=active)) == 3600.0
    over = replace(active, progress=Progress(1_200, NOW, 3.6))
    assert seconds_left(replace(state, active=over)) == 0.0
    assert seconds_left(state) is None, "no step of this generation was timed"


def budget(usd: float, spent: float = 5.0) -> Bill:
    return Bill(usd=spent, until=NOW, usd_max=usd)


def test_a_budget_is_at_risk_if_the_rest_costs_more_than_is_left():
    (text,) = forecast(bill=budget(14.0)).values()
    assert "it will cost $15.00, more than its budget of $14.00, which ends at about" in text
    assert "step 1,000 of 1,100; raise it with `sailorctl budget job USD`" in text
    assert forecast(bill=budget(14.0)).keys() == {BUDGET}
    assert forecast(bill=budget(16.0)) == {}


def test_a_job_that_has_done_all_steps_beyond_its_budget_is_at_no_risk_any_more():
    """Its last step is still being stored, which is not cut off."""
    assert forecast(step=1_100, bill=budget(5.0, spent=6.0)) == {}
    assert forecast(step=1_100, bill=budget(5.0, spent=6.0), known=(BUDGET,)) == {}


def test_a_deadline_is_at_risk_if_the_rest_takes_longer():
    found = forecast(deadline=NOW + 1800)
    assert found.keys() == {DEADLINE}
    assert "0.5 h after its deadline" in found[DEADLINE]
    assert forecast(deadline=NOW + 3700) == {}


def test_forecasts_need_an_end_a_speed_and_a_running_generation():
    assert forecast(steps=None, bill=budget(1.0)) == {}
    assert forecast(step=19, bill=budget(1.0)) == {}
    assert forecast(phase=WAITING, bill=budget(1.0)) == {}


def test_forecasts_within_the_margin_are_not_reported():
    assert forecast(bill=budget(14.9)) == {}


def test_a_known_risk_lasts_through_a_move_and_a_young_generation():
    for phase, step in ((RUNNING, 19), (STARTING, 0), (STOPPING, 100)):
        (text,) = forecast(step=step, phase=phase, bill=budget(1.0), known=(BUDGET,)).values()
        assert "more than its budget of $1.00" in text
    assert forecast(step=19, deadline=NOW, bill=budget(1.0), known=(BUDGET,)).keys() == {BUDGET}
    assert forecast(phase=WAITING, bill=budget(1.0), known=(BUDGET,)) == {}


def test_a_known_risk_is_over_once_the_budget_pays_for_all_steps():
    assert forecast(bill=budget(16.0), known=(BUDGET,)) == {}
    assert forecast(step=19, bill=budget(16.0), known=(BUDGET,)) == {}


def test_a_new_leader_takes_the_speed_that_the_record_names_until_it_sees_a_step():
    late = forecast(step=19, step_s=None, bill=budget(1.0), known=(BUDGET,))
    assert late.keys() == {BUDGET}
