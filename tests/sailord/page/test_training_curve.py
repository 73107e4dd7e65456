"""The curve of loss: bounded, one sample a second, of training alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agents.protocol.records import JobId
from sailord.core.model.phases import Held
from sailord.core.model.state import State
from sailord.page.training_curve import CURVES_MAX, SAMPLES_MAX, TrainingCurve, TrainingCurves
from tests.sailord.core.states import JOB, NOW, TERM, A, B, job, node, report, state


def at(seconds: float, step: int) -> State:
    here = state(
        None, node(A, report(A, step=step, loss=1 / step)), node(B, report(B, step=step)), step=step
    )
    return replace(here, now=NOW + seconds)


def test_samples_are_a_second_apart_and_have_the_newest_loss() -> None:
    curve = TrainingCurve(JOB)
    for tenth in range(31):
        curve.observe(at(tenth / 10, 40 + tenth))
    assert [(s.at - NOW, s.step, s.loss) for s in curve.samples] == [
        (0, 40, 1 / 40), (1, 50, 1 / 50), (2, 60, 1 / 60), (3, 70, 1 / 70),
    ]  # fmt: skip


def test_the_curve_is_bounded_and_still_covers_all_the_time() -> None:
    curve = TrainingCurve()
    for second in range(3 * SAMPLES_MAX):
        curve.observe(at(second, 41 + second))
    assert SAMPLES_MAX / 2 <= len(curve.samples) <= SAMPLES_MAX
    assert curve.samples[0].step == 41
    assert curve.samples[-1].at >= NOW + 3 * SAMPLES_MAX - 5
    assert curve.version > 1


def test_nothing_is_taken_while_the_job_does_not_train() -> None:
    curve = TrainingCurve()
    curve.observe(state(Held("failures", NOW)))
    assert curve.samples == []


def led(id_: str, seconds: float, **about: Any) -> State:
    """The part of a job of this name, which we lead."""
    here = state(None, node(A), node(B), job=job(id=JobId(id_), **about), step=40 + int(seconds))
    return replace(here, now=NOW + seconds, term=TERM)


def test_each_job_has_a_curve_and_that_of_one_that_ended_stays() -> None:
    curves = TrainingCurves()
    curves.observe([led("one", 0), led("two", 0)])
    curves.observe([led("two", 1)])
    assert [sample.step for sample in curves.of("one").samples] == [40]
    assert [sample.step for sample in curves.of("two").samples] == [40, 41]
    assert curves.of("three").samples == []
    assert curves.of(None) is curves.of("two"), "the one with the last sample"


def test_a_job_with_the_id_of_a_forgotten_one_has_a_curve_of_its_own() -> None:
    curves = TrainingCurves()
    curves.observe([led("one", 0)])
    curves.observe([led("one", 20, submitted_at=NOW + 10)])
    assert [sample.step for sample in curves.of("one").samples] == [60]


def test_the_curves_that_ended_first_are_forgotten_and_those_of_running_jobs_are_not() -> None:
    curves = TrainingCurves()
    for number in range(CURVES_MAX + 3):
        curves.observe([led("long", number / 9), led(f"job-{number}", number)])
    assert len(curves.by_job) == CURVES_MAX
    assert curves.of("long").samples
    assert not curves.of("job-3").samples
    assert curves.of("job-4").samples
