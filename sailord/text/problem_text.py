"""Text of what may need a person, for ``status`` and ``doctor``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sailord.text.units import duration

INDENT = 12


LINES_MAX = 2
"""Most lines of the first problem on a small terminal."""


def problem_lines(status: dict[str, Any], columns: int | None = None) -> list[str]:
    """Return the first thing that needs a person, and how many do.

    With ``columns``, those of a small terminal, it is cut to ``LINES_MAX`` lines.
    """
    problems = problem_texts(status)
    if not problems:
        return ["problems    none"]
    more = f" (1 of {len(problems)}: sailorctl doctor)" if len(problems) > 1 else ""
    line = f"problems    {problems[0]}"
    if columns is None:
        return [line + more]
    # Later lines are indented, and a word may not fit at the end of one.
    room = LINES_MAX * columns - 2 * INDENT
    if len(line) + len(more) <= room:
        return [line + more]
    more = more or " (sailorctl doctor)"
    return [f"{line[: room - len(more) - 3].rstrip()}...{more}"]


def doctor_text(status: Mapping[str, Any]) -> str:
    """Return the problems with their cures, and which webhook receivers are notified."""
    lines, receivers = problem_texts(status) or ["no problems found"], status.get("receivers")
    if receivers is not None:  # An older sailord does not say it.
        told = ", ".join(receivers) or "none configured; see docs/api.md#webhooks-out"
        lines = [*lines, f"notifications: {told}"]
    return "\n".join(lines)


def problem_texts(status: Mapping[str, Any]) -> list[str]:
    """Return what needs a person, and for how long; an older sailord does not say that."""
    texts, times = status["problems"], status.get("problems_since", ())
    ages = [_standing_for(since, status) for since in times] or [""] * len(texts)
    return [f"{age}{text}" for text, age in zip(texts, ages, strict=True)]


def _standing_for(since: float, status: Mapping[str, Any]) -> str:
    age_s, leader = status["at"] - since, status["leader"]
    if age_s < 1:
        return ""
    least = "at least " if leader is not None and leader.get("since") == since else ""
    return f"for {least}{duration(age_s)}: "
