"""The tables of `benchmarks/fidelity.py`, and where they go in docs/accuracy.md."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from matplotlib.figure import Figure

from benchmarks.fidelity_moves import LATER
from benchmarks.fidelity_report import (
    DOCUMENT,
    MOVES,
    PLANS,
    _timelines,
    moves_table,
    summary_lines,
)
from tests.worker.training_runs import plan_of
from worker.layout.rank_layout import rank_places


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
    heading, _, row, _, title, *ratios = moves_table([move])
    assert title == "first moves"
    phases = ["detect", "plan", "quiesce", "fetch", "rebuild", "verify", "first_step"]
    assert heading.split()[2:] == phases
    cells = "2.00 (1.00) 4.40 (-) 0.00 (0.00) 0.10 (0.40) - 0.20 (0.00) - -"
    assert row.removeprefix("loss of a").split() == cells.split()
    found = {line.split()[0]: float(line.split()[1]) for line in ratios}
    assert found == {"downtime": 0.5, "plan": 1.0, "quiesce": 4.0, "rebuild": 0.01}
    again = {**move, "change": LATER[0], "predicted_s": 2.0}
    *_, title, downtime, _, _, _ = moves_table([move, again])
    assert title == "later moves, by earlier ones"
    assert downtime.split()[:2] == ["downtime", "1.00"]


def test_timelines_are_drawn_of_chunks_and_of_records_from_before_them():
    span = {"activity": "forward", "start_ns": 0, "end_ns": 9}
    place = asdict(rank_places(plan_of(4, (1, [(0, 5, 1)])))[0])
    older = {"pipeline": 0, "stage": 0, "layers": [0, 5]}
    for each in (place, older):
        ranks = [{"node": "a", "place": each, "spans": [span]}]
        figure = Figure()
        _timelines(figure, {"measured": {"ranks": ranks}, "predicted": {"timeline": []}})
        (label,) = figure.axes[0].get_yticklabels()
        assert label.get_text() == "a, layers 0-4"


def test_plans_inside_their_error_bars_are_counted():
    rows = [
        {"plan": name, "predicted_s": 1.0 + error, "measured_s": 1.0 + number, "error": error,
         "error_bar": 0.1, "memory_errors": [0.0], "bytes_errors": {}}
        for number, (name, error) in enumerate({"a": 0.05, "b": -0.1, "c": 0.2}.items())
    ]  # fmt: skip
    assert "inside their error bars: 2 of 3 plans" in summary_lines(rows)
