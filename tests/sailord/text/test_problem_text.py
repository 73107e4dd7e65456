"""What needs a person, as ``status`` and ``doctor`` show it."""

from __future__ import annotations

from sailord.text.problem_text import doctor_text, problem_lines
from sailord.text.wrap import wrapped

LONG = "a2 was lost: its lease expired while no job used it; " + "if it is up, start it again; " * 8


def status(*problems: str, **others):
    return {"problems": problems, "at": 0.0, "leader": None, **others}


def test_on_a_small_terminal_a_problem_takes_two_lines_and_names_the_command_for_the_rest():
    for found, more in ((status(LONG), ""), (status(LONG, "b"), "1 of 2: ")):
        (whole,) = problem_lines(found)
        assert LONG.strip() in whole
        for columns in (40, 60, 79):
            (line,) = problem_lines(found, columns)
            assert len(wrapped(line, columns).splitlines()) <= 2
            assert line.startswith("problems    a2 was lost")
            assert line.endswith(f"... ({more}sailorctl doctor)")


def test_a_short_problem_is_whole_on_a_small_terminal():
    assert problem_lines(status("no leader"), 60) == ["problems    no leader"]


def test_doctor_says_who_is_told():
    assert doctor_text(status()) == "no problems found", "an older sailord does not say it"
    assert doctor_text(status(receivers=())).endswith(
        "no problems found\nnotifications: none configured; see docs/api.md#webhooks-out"
    )
    told = doctor_text(status("a", receivers=("hooks.slack.com (slack)", "h (sailor)")))
    assert told == "a\nnotifications: hooks.slack.com (slack), h (sailor)"
