"""One line for each step, and a bar with the remaining time where a person looks."""

from __future__ import annotations

import io
import json
import sys

import pytest

from worker.reporting.progress_display import ProgressDisplay

LINE = {
    "step": 3,
    "loss": 2.5,
    "learning_rate": 3e-4,
    "grad_norm": 1.25,
    "samples_per_s": 12.34,
    "skipped_steps": 0,
    "samples": 16,
    "seconds": 1.5,
    "sample_hash": "25ed6bef4b83dd0d",
}


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, "lr 0.0003   12.3 samples/s    1.500 s  25ed6bef4b83dd0d"),
        ({"tokens_per_s": 4321.0}, "4,321 tokens/s    1.500 s"),
        ({"tokens_per_s": 4321.0, "mfu": 0.384}, "4,321 tokens/s, 38% MFU  1.500 s"),
        ({"skipped_steps": 2}, "25ed6bef4b83dd0d  2 skipped so far"),
        ({"data_wait_s": 0.4, "seconds": 0.5}, "25ed6bef4b83dd0d  waited 80% of it for data"),
        ({"skipped_steps": 2, "skipped": True}, "  skipped: not finite (2 so far)"),
        ({"loss": None, "grad_norm": None}, "loss none       norm none"),
    ],
)
def test_a_step_is_one_line(more, told, capsys):
    with ProgressDisplay(5, as_json=False) as display:
        display.step({**LINE, **more})
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 3      loss ")
    assert told in line


def test_a_terminal_shows_a_bar_with_the_time_left(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressDisplay(4, as_json=False) as display:
        display.step(LINE)
        shown = terminal.getvalue().split("\r\x1b[K")
        assert shown[-1] == "[######..................] 1 of 4, 12.3 samples/s, 4 s left"
        for _ in range(3):
            display.step(LINE)
    *_, last, cleared = terminal.getvalue().split("\r\x1b[K")
    assert last == "[########################] 4 of 4, 12.3 samples/s, 0 s left"
    assert cleared == "", "nothing remains"
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_json_is_printed_as_it_is(capsys):
    with ProgressDisplay(4, as_json=True) as display:
        display.step(LINE)
    said = capsys.readouterr()
    assert json.loads(said.out) == LINE
    assert said.err == ""


def test_a_figure_of_an_evaluation_that_is_not_finite_is_none(capsys):
    with ProgressDisplay(4, as_json=False) as display:
        display.evaluation(3, {"loss": None, "accuracy": 0.5})
    assert capsys.readouterr().out == "evaluation after step 3: loss none  accuracy 0.50000\n"
