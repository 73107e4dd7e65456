"""A rank keeps when its passes ran, of steps that all ranks choose alike."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worker.profiling import compute_time
from worker.profiling.compute_time import ComputeTimer
from worker.profiling.kept_steps import FILE, KEEP_S, PASSES_MAX, KeptStepsFile

GRAIN_S = 0.25
"""Times that floats hold exactly."""


class Rank:
    """A rank whose clock moves only when the test says so."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self.folder, self.now = folder, 1000.0
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(compute_time, "time", clock)
        self.timer = ComputeTimer(keep=KeptStepsFile(folder, now=lambda: self.now).offer)

    def work(
        self, kind: compute_time.ComputeKind, micro_batch: int = 0, *, waits_s: float = 0.0
    ) -> None:
        self.now += waits_s
        with self.timer.piece(kind, micro_batch):
            self.now += GRAIN_S

    def step(self, number: int, *, passes: int = 1, votes: bool = True, lasts_s: float = 0) -> None:
        until = self.now + lasts_s
        self.timer.begin_step(number)
        for micro_batch in range(passes):
            self.work("F", micro_batch)
        if votes:
            self.timer.end_vote()
        self.work("update")
        self.timer.end_step()
        self.now = max(self.now, until)

    def kept(self) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = json.loads((self.folder / FILE).read_text())["steps"]
        except FileNotFoundError:
            return []
        return found

    def numbers(self) -> list[int]:
        return [each["step"] for each in self.kept()]


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(tmp_path / "0", monkeypatch)


def test_passes_are_kept_in_their_order_with_times_since_the_steps_beginning(rank: Rank) -> None:
    rank.timer.begin_step(7)
    rank.work("F", 0, waits_s=1.0)
    rank.work("F", 1)
    rank.work("B", 0, waits_s=2.0)
    begun = rank.timer.now()
    rank.now += 0.5
    rank.timer.end_sum(begun)
    rank.timer.end_vote()
    rank.work("update", waits_s=0.25)
    rank.timer.end_step()
    (kept,) = rank.kept()
    assert kept.pop("at") > 0
    assert kept == {
        "step": 7,
        "voted_s": 4.25,
        "passes": [["F", 1.0, 1.25, 0], ["F", 1.25, 1.5, 1], ["B", 3.5, 3.75, 0]],
        "sums": [[3.75, 4.25]],
        "update": [4.5, 4.75],
    }


def test_a_step_without_an_update_has_none(rank: Rank) -> None:
    rank.timer.begin_step(1)
    rank.work("F")
    rank.timer.end_vote()
    rank.timer.end_step()
    assert rank.kept()[0]["update"] == []


def test_passes_beyond_the_limit_are_left_out_and_the_update_stays(rank: Rank) -> None:
    rank.step(1, passes=PASSES_MAX + 3)
    (kept,) = rank.kept()
    assert [batch for *_, batch in kept["passes"]] == list(range(PASSES_MAX))
    assert kept["update"][1] == (PASSES_MAX + 4) * GRAIN_S


def test_a_step_that_ended_without_a_vote_of_its_own_is_not_kept(rank: Rank) -> None:
    rank.step(1, votes=False)
    assert rank.kept() == []


def test_an_unfinished_step_leaves_no_passes_in_the_next(rank: Rank) -> None:
    rank.timer.begin_step(1)
    rank.work("F", 5)
    rank.step(1)
    assert [batch for *_, batch in rank.kept()[0]["passes"]] == [0]


def test_short_steps_are_kept_ever_more_rarely_until_it_is_seldom_enough(rank: Rank) -> None:
    written: dict[int, float] = {}
    for number in range(64):
        rank.step(number, lasts_s=1.0)
        written.setdefault(rank.numbers()[-1], rank.now)
    assert list(written) == [0, 1, 2, 4, 8, 16, 24, 32, 40, 48, 56]
    times = list(written.values())
    assert all(b - a >= KEEP_S for a, b in pairwise(times[4:]))


def test_ranks_that_write_at_other_times_have_kept_a_step_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their steps last alike, but one finds them just shorter than the limit, the other not."""
    ranks = []
    for name, lasts_s in (("a", KEEP_S / 4 + 0.01), ("b", KEEP_S / 4 - 0.01)):
        with monkeypatch.context() as patched:
            each = Rank(tmp_path / name, patched)
            history = []
            for number in range(100):
                each.step(number, lasts_s=lasts_s)
                history.append(set(each.numbers()))
        ranks.append(history)
    assert ranks[0] != ranks[1], "they keep steps at the same times"
    assert all(a & b for a, b in zip(*ranks, strict=True))


def test_training_goes_on_where_the_file_cannot_be_written(rank: Rank) -> None:
    (rank.folder / FILE).mkdir()
    rank.step(1)
    assert (rank.folder / FILE).is_dir()


class Event:
    """An event of a GPU: it has happened once the test says so."""

    past = 0
    """How many of all events have happened."""
    made = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.number = -1

    def record(self) -> None:
        Event.made += 1
        self.number = Event.made

    def query(self) -> bool:
        return self.number <= Event.past

    def synchronize(self) -> None:
        Event.past = max(Event.past, self.number)

    def elapsed_time(self, end: Event) -> float:
        assert self.query(), "it did not happen yet: torch would raise"
        assert end.query(), "it did not happen yet: torch would raise"
        return 1e3 * (end.number - self.number)


@pytest.fixture
def gpu_timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ComputeTimer:
    """A timer of a GPU on which each event comes a second after the one before."""
    monkeypatch.setattr(Event, "made", 0)
    monkeypatch.setattr(Event, "past", 0)
    monkeypatch.setattr(compute_time.torch.cuda, "Event", Event)
    return ComputeTimer("cuda", keep=KeptStepsFile(tmp_path, now=lambda: 0.0).offer)


def run_on_gpu(timer: ComputeTimer, number: int) -> None:
    timer.begin_step(number)
    for kind in ("F", "B"):
        with timer.piece(kind):
            pass
    timer.end_vote()
    timer.end_step()


def test_a_gpus_step_is_kept_when_the_next_one_ends(
    gpu_timer: ComputeTimer, tmp_path: Path
) -> None:
    run_on_gpu(gpu_timer, 0)
    assert not (tmp_path / FILE).exists(), "its last work may not have been done yet"
    Event.past = Event.made
    run_on_gpu(gpu_timer, 1)
    (kept,) = json.loads((tmp_path / FILE).read_text())["steps"]
    assert (kept["step"], kept["voted_s"]) == (0, 5.0)
    assert kept["passes"] == [["F", 1.0, 2.0, 0], ["B", 3.0, 4.0, 0]]


def test_a_step_that_a_gpu_has_not_finished_is_not_waited_for(
    gpu_timer: ComputeTimer, tmp_path: Path
) -> None:
    run_on_gpu(gpu_timer, 0)
    Event.past = Event.made - 1
    run_on_gpu(gpu_timer, 1)
    assert not (tmp_path / FILE).exists()


def test_an_emulated_slower_gpu_waits_for_its_own_work_alone(
    gpu_timer: ComputeTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole device would wait for receives that were requested ahead of the peer's sends."""
    slept: list[float] = []
    monkeypatch.setattr(compute_time.time, "sleep", slept.append)
    monkeypatch.delattr(compute_time.torch.cuda, "synchronize")
    gpu_timer.times_slower = lambda: 3.0
    gpu_timer.begin_step()
    with gpu_timer.piece("F"):
        pass
    assert slept == [2.0]
