"""Earlier moves correct the prediction of the next, separately by kind and phase."""

from __future__ import annotations

import pytest

from planner.replan.past_moves import FACTOR_MAX, LEAST_S, PastMove, corrected, phase_factors

PREDICTED = (("plan", 0.05), ("quiesce", 0.5), ("rebuild", 0.0), ("first_step", 1.0))


def move(*, is_planned: bool = False, **measured: float) -> PastMove:
    return PastMove(is_planned, PREDICTED, tuple(measured.items()))


def test_without_moves_nothing_is_corrected():
    assert corrected(dict(PREDICTED), phase_factors((), is_planned=True)) == dict(PREDICTED)


def test_a_phase_is_corrected_by_the_median_of_measured_over_predicted():
    moves = [move(quiesce=each, first_step=2.0) for each in (0.1, 0.05, 9.0)]
    found = corrected(dict(PREDICTED), phase_factors(moves, is_planned=False))
    assert found == pytest.approx({**dict(PREDICTED), "quiesce": 0.1, "first_step": 2.0})


def test_a_phase_predicted_as_0_s_is_corrected_to_its_measured_time():
    found = corrected(dict(PREDICTED), phase_factors([move(rebuild=0.3)], is_planned=False))
    assert found["rebuild"] == pytest.approx(0.3)


def test_planned_moves_and_losses_are_corrected_separately():
    moves = [move(first_step=2.0), move(is_planned=True, first_step=0.5)]
    assert phase_factors(moves, is_planned=False) == {"first_step": 2.0}
    assert phase_factors(moves, is_planned=True) == {"first_step": 0.5}


def test_phases_in_which_the_job_trains_are_not_downtime():
    """A planned move may wait for new nodes to be prepared before the old plan stops."""
    planned = move(is_planned=True, plan=7.0, quiesce=20.0)
    assert phase_factors([planned], is_planned=True) == {}
    assert phase_factors([move(plan=0.1)], is_planned=False) == {"plan": 2.0}


def test_only_the_last_measured_moves_count():
    moves = [move(quiesce=50.0)] * 20 + [move(quiesce=0.5)] * 5 + [move()]
    assert phase_factors(moves, is_planned=False)["quiesce"] == 1.0


def test_an_absurd_measurement_is_limited():
    found = phase_factors([move(quiesce=1e6, rebuild=0.0)], is_planned=False)
    assert found == {"quiesce": FACTOR_MAX, "rebuild": pytest.approx(1 / FACTOR_MAX)}
    assert LEAST_S * FACTOR_MAX == 1.0
