"""The pace is measured within one generation of one job."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import JobId
from sailord.controller.step_rate import StepRate
from sailord.core.model.phases import Running
from sailord.core.model.state import State
from tests.sailord.core.states import A as NODE
from tests.sailord.core.states import G, active_of, node, state


def seen_at(now: float, step: int, job: str, number: int) -> State:
    """A job that has trained a step in the generation of that number."""
    known = state(Running(0.0), node(NODE))
    active = active_of(known)
    ours = replace(G, job=JobId(job), number=number)
    active = replace(active, job=JobId(job), generation=ours)
    return replace(
        known, now=now, active=replace(active, progress=replace(active.progress, step=step))
    )


def test_speed_is_the_mean_of_the_steps_after_the_first() -> None:
    pace = StepRate()
    for now, step in [(0.0, 1), (5.0, 10), (7.0, 12)]:
        pace.observe(seen_at(now, step, "one", 1))
    assert pace.iteration_s == 1.0


def test_a_slow_minute_is_forgotten_soon_after_its_end() -> None:
    pace, now = StepRate(), 0.0
    for step in range(101):
        now += 4.0 if 20 <= step < 40 else 0.5
        pace.observe(seen_at(now, step, "one", 1))
    assert pace.iteration_s == 0.5, "30 s after its end"


def test_a_speed_is_of_several_samples_also_where_steps_are_long() -> None:
    pace, now = StepRate(), 0.0
    for step in range(20):
        now += 30.0 if step % 2 else 90.0
        pace.observe(seen_at(now, step, "one", 1))
    assert pace.iteration_s == 60.0


def test_another_job_with_a_generation_of_the_same_number_is_measured_afresh() -> None:
    pace = StepRate()
    for now, step in [(0.0, 1), (1.0, 2), (2.0, 3)]:
        pace.observe(seen_at(now, step, "one", 1))
    pace.observe(seen_at(3.0, 900, "two", 1))
    assert pace.iteration_s is None
