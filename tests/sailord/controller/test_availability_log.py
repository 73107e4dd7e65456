"""The leader logs which GPUs are up, as `sailorctl trace import` reads it."""

from __future__ import annotations

from dataclasses import replace

from sailord.controller.availability_log import AvailabilityLog
from simulator.traces.published import LogFile, series_of
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


def test_an_unwritable_log_stops_nothing(tmp_path):
    AvailabilityLog(tmp_path).note(state(None, node(A)))
