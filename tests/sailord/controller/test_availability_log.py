"""The leader logs which GPUs are up, as `sailorctl trace import` reads it."""

from __future__ import annotations

import json
from dataclasses import replace

from click.testing import CliRunner

from sailord.cli.main import main
from sailord.controller.availability_log import AvailabilityLog
from simulator.traces.published import LogFile, series_of
from simulator.traces.sailord_log import read_lines
from tests.sailord.core.states import NOW, A, B, node, state


def test_changes_of_capacity_are_logged_while_leading(tmp_path):
    log = AvailabilityLog(tmp_path / "availability.jsonl")
    both, one = state(None, node(A), node(B)), state(None, node(B))
    log.note(both)
    log.note(replace(both, now=NOW + 5))
    log.note(replace(one, now=NOW + 60))
    # Another leads for a while; what was up meanwhile is not known here.
    log.note(replace(one, now=NOW + 70, term=None))
    log.note(replace(one, now=NOW + 80))
    text = log.path.read_text()
    assert text.count("\n") == 3
    series = series_of(LogFile("availability.jsonl", text, "", 1))
    totals = [(at_s, sum(counts.values())) for at_s, counts in series.points]
    each = node(A).record.gpus
    assert totals == [(0, 2 * each), (60, each)]
    assert series.end_s == 80


def test_unchanged_capacity_is_logged_each_day(tmp_path):
    log = AvailabilityLog(tmp_path / "availability.jsonl")
    both = state(None, node(A), node(B))
    for hour in range(60):
        log.note(replace(both, now=NOW + 3600 * hour))
    text = log.path.read_text()
    assert text.count("\n") == 3
    assert series_of(LogFile("availability.jsonl", text, "", 1)).end_s == 48 * 3600


def test_an_unwritable_log_stops_nothing_and_is_tried_again(tmp_path):
    log = AvailabilityLog(tmp_path / "folder" / "availability.jsonl")
    for second in range(3):
        log.note(replace(state(None, node(A)), now=NOW + second))
    log.path.parent.mkdir()
    log.note(replace(state(None, node(A)), now=NOW + 3))
    assert json.loads(log.path.read_text())["at"] == NOW + 3


def test_a_line_that_a_crash_cut_short_is_not_continued(tmp_path):
    log = AvailabilityLog(tmp_path / "availability.jsonl")
    log.note(state(None, node(A)))
    log.note(replace(state(None, node(A), node(B)), now=NOW + 60))
    whole = log.path.read_bytes()
    last = whole.index(b"\n") + 1
    for size in range(last, len(whole)):
        log.path.write_bytes(whole[:size])
        AvailabilityLog(log.path).note(replace(state(None, node(B)), now=NOW + 90))
        lines = read_lines(log.path.read_text())
        second = [NOW + 60] if size == len(whole) - 1 else []  # Only its line break is missing.
        assert [line.at_s for line in lines if line.gpus] == [NOW, *second, NOW + 90]
        assert len(lines) == (2 if size == last else 3)


def test_a_long_log_is_renamed_and_the_one_before_it_deleted(tmp_path):
    log = AvailabilityLog(tmp_path / "availability.jsonl", bytes_max=300)
    for minute in range(100):
        up = (node(A), node(B)) if minute % 2 else (node(A),)
        log.note(replace(state(None, *up), now=NOW + 60 * minute))
    older = tmp_path / "availability.jsonl.1"
    assert sorted(tmp_path.iterdir()) == [log.path, older]
    assert all(path.stat().st_size < 400 for path in (log.path, older))
    lines = [line for path in (older, log.path) for line in read_lines(path.read_text())]
    assert [line.at_s for line in lines] == [
        NOW + 60 * minute for minute in range(100 - len(lines), 100)
    ]
    save = tmp_path / "trace.json"
    done = CliRunner().invoke(main, ["trace", "import", str(log.path), "--save", str(save)])
    assert (done.exit_code, len(json.loads(save.read_text())["points"])) == (0, len(lines) - 1)
