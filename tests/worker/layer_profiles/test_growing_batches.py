"""Which micro batches are measured, on a clock that moves only when something is measured."""

from __future__ import annotations

from worker.layer_profiles.growing_batches import (
    DoesNotFitError,
    GrowingBatches,
    measure_growing,
    powers_of_two,
)


class Bench:
    """Measures n samples in n seconds; micro batches above ``most`` do not fit."""

    def __init__(self, most: int) -> None:
        self.most, self.now_s = most, 0.0
        self.until: list[float] = []

    def now(self) -> float:
        return self.now_s

    def measure(self, micro_batch: int, until_s: float) -> str:
        if micro_batch > self.most:
            raise DoesNotFitError("1.0 GiB is lacking")
        self.until.append(until_s)
        self.now_s += micro_batch
        return f"of {micro_batch}"


def test_powers_of_two_end_at_the_most() -> None:
    assert powers_of_two(1) == (1,)
    assert powers_of_two(11) == (1, 2, 4, 8)
    assert powers_of_two(16) == (1, 2, 4, 8, 16)


def test_the_first_that_does_not_fit_ends_the_measurements() -> None:
    bench = Bench(most=3)
    found = measure_growing((1, 2, 4, 8), bench.measure, now=bench.now, until_s=100.0)
    assert found == GrowingBatches(
        ((1, "of 1"), (2, "of 2")), too_large=4, why="1.0 GiB is lacking"
    )


def test_first_micro_batch_that_does_not_fit_leaves_no_measurement() -> None:
    bench = Bench(most=0)
    found = measure_growing((1, 2), bench.measure, now=bench.now, until_s=100.0)
    assert (found.found, found.too_large) == ((), 1)


def test_time_is_shared_equally_among_those_that_are_left() -> None:
    bench = Bench(most=9)
    measure_growing((1, 2, 4), bench.measure, now=bench.now, until_s=9.0)
    assert bench.until == [3.0, 1 + 8 / 2, 3 + 6.0]


def test_without_time_only_the_first_is_measured() -> None:
    bench = Bench(most=9)
    found = measure_growing((2, 4, 8), bench.measure, now=bench.now, until_s=0.0)
    assert found == GrowingBatches(((2, "of 2"),), untried=(4, 8))
