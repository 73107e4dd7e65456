"""The spans that ranks record, and the trace made of them."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

from worker.layout.rank_layout import Chunk, RankPlace
from worker.profiling.activity_board import ActivityBoard
from worker.profiling.fault_injection import FailPoint, parse_fail_point
from worker.profiling.timeline import RankTimeline, Recorder, Span, trace


def test_spans_nest_and_carry_their_step():
    recorder = Recorder(keeps_spans=True)
    recorder.at_step(4)
    with recorder.span("forward", layer=3, micro_batch=1), recorder.span("receive"):
        pass
    inner, outer = recorder.spans
    assert (inner.activity, outer.activity, outer.step) == ("receive", "forward", 4)
    assert (outer.layer, outer.micro_batch) == (3, 1)
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


def test_no_spans_are_kept_unless_requested():
    recorder = Recorder()
    with recorder.span("forward"):
        recorder.end(recorder.begin("sync", layer=0))
    assert recorder.spans == []


def test_board_shows_the_activity_in_which_a_rank_failed():
    board = ActivityBoard(2)
    recorder = Recorder(rank=1, board=board)
    recorder.at_step(7)
    with recorder.span("backward"):
        with recorder.span("send"):
            assert board.read(1) == (7, "send")
        assert board.read(1) == (7, "backward")
    assert board.read(1) == (7, "start")
    with pytest.raises(ZeroDivisionError), recorder.span("vote"):
        raise ZeroDivisionError
    assert board.read(1) == (7, "vote")
    assert board.read(0) == (0, "start")


def test_fail_point_kills_its_rank_in_its_step_only():
    board = ActivityBoard(1)
    child = os.fork()
    if child == 0:
        recorder = Recorder(board=board, fail_at=FailPoint.parse("0:sync:2"))
        for step in (1, 2, 3):
            recorder.at_step(step)
            for activity in ("forward", "sync", "step"):
                with recorder.span(activity):
                    pass
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert board.read(0) == (2, "sync")


@pytest.mark.parametrize(
    ("text", "is_hit"),
    [
        ("3:sealing:7@2", True),
        ("*:sealing:7@2", True),
        ("3:sealing:*@2", True),
        ("*:sealing:*@2", True),
        ("4:sealing:*@2", False),
        ("*:sealing:8@2", False),
        ("*:sealed:*@2", False),
        ("*:sealing:*@3", False),
        ("*:sealing:*", False),
        ("*:sealing:*@*", True),
    ],
)
def test_fail_point_accepts_any_rank_and_any_step(text, is_hit):
    assert FailPoint.parse(text).is_at(3, "sealing", 7, 2) is is_hit


def test_fail_file_kills_one_rank_once(tmp_path):
    point = parse_fail_point(str(tmp_path / "fails"))
    assert not point.is_at(3, "sealing", 7, 2)
    (tmp_path / "fails.worker").write_text("*:sealing:*@2")
    assert not point.is_at(3, "sealing", 7, 1)
    assert point.is_at(3, "sealing", 7, 2)
    assert not point.is_at(3, "sealing", 7, 2)


def rank(number, *spans, pipeline=0, stage=0, tp=1):
    chunk = Chunk(stage, (stage, stage + 2), 0)
    place = RankPlace(number, pipeline, stage, 2, tp, number % tp, (chunk,))
    return RankTimeline(place, spans)


def test_trace_has_one_process_per_pipeline_and_rows_without_overlap():
    passes = (
        Span("forward", 1, 1_000, 2_000, None, 0),
        Span("backward", 1, 3_000, 5_000, None, 0),
        Span("step", 1, 8_000, 9_000),
    )
    sync = (
        Span("sync", 1, 4_000, 7_000, 1, in_background=True),
        Span("sync", 1, 5_000, 8_000, 0, in_background=True),
        Span("sync", 1, 7_000, 8_500, 0, in_background=True),
        Span("sync", 1, 8_600, 0, 0, in_background=True),  # never ended: not drawn
    )
    document = trace([rank(0, *passes, *sync, tp=2), rank(1, *passes, pipeline=1, stage=1)])
    events = document["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"steps", "pipeline 0", "pipeline 1"}
    rows = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for row in rows.values():
        row.sort(key=lambda event: event["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(row))
    titles = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert titles == [
        "steps",
        "stage 0 TP 0: layers 0-1, rank 0",
        "stage 0 TP 0: gradient sync",
        "stage 0 TP 0: gradient sync",
        "stage 1: layers 1-2, rank 1",
    ]
    drawn = [event["name"] for event in events if event["ph"] == "X"]
    assert drawn.count("sync 0") == 2
    assert drawn[:4] == ["step 1", "F0", "B0", "optimizer step"]
