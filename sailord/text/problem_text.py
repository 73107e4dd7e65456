"""Text of what may need a person, for ``status`` and ``doctor``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sailord.text.units import duration


def problem_lines(status: dict[str, Any]) -> list[str]:
    """Return the first thing that needs a person, and how many do."""
    problems = problem_texts(status)
    if not problems:
        return ["problems    none"]
    more = f" (1 of {len(problems)}: sailorctl doctor)" if len(problems) > 1 else ""
    return [f"problems    {problems[0]}{more}"]


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
