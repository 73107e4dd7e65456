"""The tables of `benchmarks/fidelity.py`, and where they go in docs/accuracy.md."""

from __future__ import annotations

import pytest

from benchmarks.fidelity_report import DOCUMENT, MOVES, PLANS, moves_table, summary_lines


@pytest.mark.parametrize("marks", [PLANS, MOVES])
def test_the_document_has_each_mark_once_and_in_order(marks):
    text = DOCUMENT.read_text(encoding="utf-8")
    begin, end = (text.index(mark) for mark in marks)
    assert begin < end
    assert [text.count(mark) for mark in marks] == [1, 1]


def test_every_phase_of_a_move_is_shown_and_zeros_have_a_ratio():
    move = {
        "change": "loss of a",
        "downtime_s": 2.0,
        "predicted_s": 1.0,
        "phases": {"detect": 4.4, "plan": 0.0, "quiesce": 0.1, "rebuild": 0.2},
        "predicted": [("plan", 0.0), ("quiesce", 0.4), ("rebuild", 0.0)],
    }
    heading, row, _, *ratios = moves_table([move])
    phases = ["detect", "plan", "quiesce", "fetch", "rebuild", "verify", "first_step"]
    assert heading.split()[2:] == phases
    cells = "2.00 (1.00) 4.40 (-) 0.00 (0.00) 0.10 (0.40) - 0.20 (0.00) - -"
    assert row.removeprefix("loss of a").split() == cells.split()
    found = {line.split()[0]: float(line.split()[1]) for line in ratios}
    assert found == {"downtime": 0.5, "plan": 1.0, "quiesce": 4.0, "rebuild": 0.01}


def test_plans_inside_their_error_bars_are_counted():
    rows = [
        {"plan": name, "predicted_s": 1.0 + error, "measured_s": 1.0 + number, "error": error,
         "error_bar": 0.1, "memory_errors": [0.0], "bytes_errors": {}}
        for number, (name, error) in enumerate({"a": 0.05, "b": -0.1, "c": 0.2}.items())
    ]  # fmt: skip
    assert "inside their error bars: 2 of 3 plans" in summary_lines(rows)
