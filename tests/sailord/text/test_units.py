"""Durations, counts and ranges as text."""

from __future__ import annotations

import pytest

from sailord.text.units import clock, counted, dollars, duration, memory, number_ranges, timestamp


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0.0 s"),
        (0.0, "0.0 s"),
        (0.0274, "27 ms"),
        (119.9, "119.9 s"),
        (120.0, "2 min"),
        (7200.0, "2.0 h"),
        (86_400.0, "24.0 h"),
        (172_800.0, "2.0 days"),
    ],
)
def test_duration_has_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 KiB"),
        (644_245, "629 KiB"),
        (2**20, "1 MiB"),
        (2.5 * 2**30, "2.5 GiB"),
        (99.99 * 2**30, "100 GiB"),
        (1360 * 2**30, "1,360 GiB"),
    ],
)
def test_memory_has_the_unit_that_suits_it(size: float, text: str) -> None:
    assert memory(size) == text


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (0.0, "$0.00"),
        (4e-7, "$0.00"),
        (0.000004, "$0.000004"),
        (0.0042, "$0.004"),
        (0.0096, "$0.01"),
        (0.014, "$0.01"),
        (1234.5, "$1,234.50"),
    ],
)
def test_less_than_a_cent_is_not_nothing(usd: float, text: str) -> None:
    assert dollars(usd) == text


def test_numbers_in_a_row_become_a_range() -> None:
    assert number_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert number_ranges([3]) == "3"
    assert number_ranges([0, 2, 4], ranges_max=2) == "0, 2, ..."


def test_a_count_of_one_is_singular() -> None:
    assert [counted(n, "pool") for n in (0, 1, 2)] == ["0 pools", "1 pool", "2 pools"]


@pytest.mark.usefixtures("in_berlin")
def test_a_moment_is_local_time_with_its_distance_from_utc() -> None:
    assert timestamp(0.0) == "1970-01-01 01:00:00+01:00"
    assert timestamp(1_782_910_800.0) == "2026-07-01 15:00:00+02:00"
    assert clock(0.0) == "01:00:00"


def test_a_moment_in_utc_says_so_too() -> None:
    assert timestamp(0.0) == "1970-01-01 00:00:00+00:00"
