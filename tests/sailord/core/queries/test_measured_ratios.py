"""What the planner and the operator hear of measured over predicted compute times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agents.protocol.codec import plain
from agents.protocol.records import ComputeTimes
from sailord.api.answers.render import active_view, job_view, why_view
from sailord.controller.step_rate import StepRate
from sailord.core.model.commands import RequestPlan
from sailord.core.model.events import Ticked
from sailord.core.model.phases import Phase, Running, Waiting
from sailord.core.model.state import State
from sailord.core.model.stragglers import NodeSpeeds
from sailord.core.queries.straggler_queries import measured_ratios, prediction_drifts
from sailord.text.cluster_text import why_text
from tests.sailord.core.states import (
    BEGAN,
    JOB,
    NOW,
    A,
    B,
    act,
    active_of,
    generation,
    node,
    report,
    state,
)

G = generation(A, B, busy=ComputeTimes((0.1, 0.2), relative_error=0.1))
SPEEDS = NodeSpeeds(G.number, 10, NOW, {"A100-40": 1.5})
MEASURED = {"estimate": {"source": "measured"}}


def training(speeds: NodeSpeeds = SPEEDS, phase: Phase | None = None) -> State:
    """Two nodes of which one takes twice, one as long as predicted; the plan is to be checked."""
    nodes = [
        node(A, report(A, step=40, busy=((0, 0.2),))),
        node(B, report(B, step=40, busy=((1, 0.2), (7, 9.0)))),
    ]
    made = state(phase or Running(BEGAN), *nodes, generation=G, step=40, considered_at=NOW - 600)
    active = active_of(made)
    return replace(made, active=replace(active, slowness=replace(active.slowness, speeds=speeds)))


def test_ratios_are_by_rank() -> None:
    made = training()
    assert measured_ratios(made, active_of(made)) == ((0, pytest.approx(2.0)), (1, 1.0))


def test_the_planner_hears_of_them_unless_the_job_waits_for_it() -> None:
    _, (asked,) = act(training(), Ticked(NOW))
    assert isinstance(asked, RequestPlan)
    assert (asked.is_urgent, asked.ratios) == (False, ((0, pytest.approx(2.0)), (1, 1.0)))
    _, (asked,) = act(training(phase=Waiting("a reason", NOW - 5)), Ticked(NOW))
    assert isinstance(asked, RequestPlan)
    assert (asked.is_urgent, asked.ratios) == (True, ())


@pytest.mark.parametrize(
    "speeds", [NodeSpeeds(G.number, 10, NOW), replace(SPEEDS, generation=G.number - 1)]
)
def test_the_first_steps_and_other_generations_say_nothing(speeds: NodeSpeeds) -> None:
    made = training(speeds)
    assert measured_ratios(made, active_of(made)) == ()
    if not speeds.factors:
        assert prediction_drifts(active_of(made)) == ()


def told(about: dict[str, Any], factor: float) -> tuple[str, ...]:
    made = training(replace(SPEEDS, factors={"A100-40": factor}))
    view = active_view(made, StepRate(), None, about, {}, NOW)
    job = job_view(made, JOB)
    assert view is not None
    assert job is not None
    why = why_view(made, job, about, (), None)
    assert why.drift == view.drift
    assert all(drift in why_text(plain(why)) for drift in view.drift)
    return view.drift


def test_drift_beyond_the_error_bar_is_shown() -> None:
    said = ("A100-40 computes 1.50 times as long as predicted (error bar 10%)",)
    assert told(MEASURED, 1.5) == said
    assert told(MEASURED, 1.05) == ()
    assert told(MEASURED, 0.5) != ()


def test_a_computed_prediction_is_not_expected_to_hold() -> None:
    assert told({"estimate": {"source": "analytic"}}, 1.5) == ()
    assert told({}, 1.5) == ()
