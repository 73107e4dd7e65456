"""Medians, spreads and the end of sampling, on numbers whose result is known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from worker.layer_profiles.sampling import (
    SAMPLES_LEAST,
    SAMPLES_MOST,
    is_confident,
    median_and_spread,
    sample,
)


def test_median_and_spread_ignore_one_wild_value() -> None:
    assert median_and_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, pytest.approx(1 / 3))
    assert median_and_spread([1.0, 2.0, 3.0, 4.0, 1e9]) == (3.0, pytest.approx(1 / 3))


def test_one_value_has_no_spread() -> None:
    assert median_and_spread([2.0]) == (2.0, 0.0)


def test_confidence_grows_with_the_root_of_the_samples() -> None:
    # The interquartile range is 2 %, so the notch is 3.14 % / sqrt(n): below 1 % from n = 10 on.
    few = [0.99, 0.99, 1.0, 1.01, 1.01]
    assert not is_confident(few)
    assert is_confident(few * 2)
    assert not is_confident([1.0] * (SAMPLES_LEAST - 1))


class Clock:
    """Passes one second whenever a round is taken."""

    def __init__(self, totals: Iterator[float]) -> None:
        self.now_s, self.totals = 0.0, totals

    def now(self) -> float:
        return self.now_s

    def take(self) -> list[list[float]]:
        self.now_s += 1
        return [[next(self.totals)]]


def noisy() -> Iterator[float]:
    while True:
        yield from (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("totals", "until_s", "rounds"),
    [
        (iter([1.0] * 9), 1e9, SAMPLES_LEAST),  # Equal ones are enough at once.
        (noisy(), 20.0, 20),  # The time is used up.
        (noisy(), 0.0, SAMPLES_LEAST),  # The fewest samples are always taken.
        (noisy(), 1e9, SAMPLES_MOST),
    ],
)
def test_sampling_ends_at_a_small_spread_or_at_its_time_limit(
    totals: Iterator[float], until_s: float, rounds: int
) -> None:
    clock, told = Clock(totals), []
    rows = sample(clock.take, now=clock.now, until_s=until_s, told=told.append)
    assert len(rows) == rounds
    assert told == list(range(1, rounds + 1))
