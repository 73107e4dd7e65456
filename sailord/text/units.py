"""Moments, durations, dollars, sizes, counts and ranges of numbers as text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

DAY_S = 86_400
YEAR_S = 365.0 * DAY_S
"""An end beyond this is told as a duration alone."""


def timestamp(at: float) -> str:
    """Return a Unix time as local time with its distance from UTC, to the second."""
    return datetime.fromtimestamp(at).astimezone().isoformat(" ", "seconds")


def clock(at: float) -> str:
    """Return a Unix time as the local time of day."""
    return datetime.fromtimestamp(at).strftime("%H:%M:%S")


def duration(seconds: float) -> str:
    """Return a duration in the unit that suits it: ms, s, min, h or days."""
    if 0 < seconds < 0.05:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 120:
        return f"{max(seconds, 0.0):.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * DAY_S else f"{seconds / DAY_S:.1f} days"


def memory(size: float) -> str:
    """Return bytes of memory in the unit that suits them: KiB, MiB or GiB."""
    unit, scale = next(
        (u for u in (("GiB", 2**30), ("MiB", 2**20)) if size >= u[1]), ("KiB", 2**10)
    )
    amount = size / scale
    return f"{amount:,.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"


def dollars(usd: float) -> str:
    """Return dollars and cents; what is less than a cent with its first digit, to a millionth."""
    first_digit = float(f"{usd:.1g}")
    tiny = f"{first_digit:.6f}".rstrip("0")
    return f"${tiny}" if 0.000001 <= first_digit < 0.01 else f"${usd:,.2f}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in the singular or plural: 1 pool, 2 pools."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def number_ranges(numbers: Sequence[int], ranges_max: int | None = None) -> str:
    """Return sorted numbers as ranges: 0-3, 7; with an ellipsis after ``ranges_max`` of them."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ", ".join(texts[:ranges_max]) + (", ..." if len(texts) > len(texts[:ranges_max]) else "")
