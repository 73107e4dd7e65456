"""The curve of loss: bounded, one sample a second, of training alone."""

from __future__ import annotations

from dataclasses import replace

from sailord.core.model.phases import Held
from sailord.core.model.state import State
from sailord.page.training_curve import SAMPLES_MAX, TrainingCurve
from tests.sailord.core.states import NOW, A, B, node, report, state


def at(seconds: float, step: int) -> State:
    here = state(
        None, node(A, report(A, step=step, loss=1 / step)), node(B, report(B, step=step)), step=step
    )
    return replace(here, now=NOW + seconds)


def test_samples_are_a_second_apart_and_have_the_newest_loss() -> None:
    curve = TrainingCurve()
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
