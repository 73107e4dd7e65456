"""The file that a worker writes of its last steps is read, and nothing else in its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agents.protocol.records import KeptStep, KeptSteps
from agents.workers.kept_steps import BYTES_MAX, FILE, read_kept_steps
from worker.profiling import kept_steps
from worker.profiling.compute_time import TimedPiece, TimedStep

PIECES = [
    TimedPiece("F", 0, 1.0, 1.5),
    TimedPiece("B", 0, 2.0, 3.0),
    TimedPiece("update", 0, 4.0, 4.5),
]
STEP = TimedStep(8, 1.0, 3.5, PIECES, [(2.5, 3.25)])


def test_what_a_worker_writes_is_read(tmp_path: Path) -> None:
    kept_steps.KeptStepsFile(tmp_path).offer(STEP)
    found = read_kept_steps(tmp_path, now=7.0)
    assert found is not None
    (step,) = found.steps
    passes = (("F", 0.0, 0.5, 0), ("B", 1.0, 2.0, 0))
    assert found == KeptSteps((KeptStep(8, step.at, 2.5, passes, (3.0, 3.5), ((1.5, 2.25),)),), 7.0)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"steps": [{"step": NaN}]}', "\xff", "null"])
def test_what_is_no_list_of_steps_is_not_passed_on(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text, encoding="latin-1")
    assert read_kept_steps(tmp_path, now=7.0) is None


def test_a_longer_file_than_workers_write_is_not_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"steps": [], "more": "x" * BYTES_MAX}))
    assert read_kept_steps(tmp_path, now=7.0) is None


def test_no_link_is_followed_out_of_the_folder(tmp_path: Path) -> None:
    secret = tmp_path / "elsewhere"
    secret.write_text('{"steps": []}')
    (tmp_path / FILE).symlink_to(secret)
    assert read_kept_steps(tmp_path, now=7.0) is None


def test_the_longest_file_of_a_worker_is_read(tmp_path: Path) -> None:
    pieces = [TimedPiece("B", 9999, 1e5 + i, 1e5 + i + 0.123456) for i in range(600)]
    keeper = kept_steps.KeptStepsFile(tmp_path)
    for number in (1024, 2048):
        sums = [(each.begun, each.ended) for each in pieces]
        keeper.offer(TimedStep(number, 1.0, 2e5, pieces, sums))
    found = read_kept_steps(tmp_path, now=7.0)
    assert found is not None
    assert [len(step.passes) for step in found.steps] == [512, 512]
    assert [len(step.sums) for step in found.steps] == [512, 512]
