"""Which series the soak calls rising, and which level."""

from __future__ import annotations

import pytest

from benchmarks.soak import MIB, judge


def series(values):
    return [(at * 30.0, value * MIB) for at, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "is_rising"),
    [
        ([40 + 0.05 * i for i in range(120)], True),
        ([40 + 0.05 * i + (i % 7) / 10 for i in range(120)], True),
        ([40 + (i % 7) / 10 for i in range(120)], False),
        ([40] * 50 + [48] * 70, False),
        ([40 + min(i, 60) * 0.05 for i in range(120)], False),
        ([40 - 0.05 * i for i in range(120)], False),
    ],
    ids=["rising", "rising noisily", "level", "a step", "a rise that ends", "falling"],
)
def test_series_that_levelled_off_is_not_rising(values, is_rising):
    verdict = judge(series(values), 1 * MIB)
    assert verdict is not None
    assert verdict.is_rising == is_rising


def test_a_rise_within_the_limit_is_level():
    values = series([40 + 0.001 * i for i in range(120)])
    assert not judge(values, 1 * MIB).is_rising
    assert judge(values, 0.05 * MIB).is_rising


def test_rise_is_reported_per_hour():
    verdict = judge(series([i / 10 for i in range(121)]), 1 * MIB)
    assert verdict.per_hour / MIB == pytest.approx(12.0, rel=0.02)


def test_too_few_samples_are_not_judged():
    assert judge(series([1] * 11), 1 * MIB) is None
