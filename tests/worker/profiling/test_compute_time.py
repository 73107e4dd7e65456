"""A rank's compute time is separated from its waits."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from worker.profiling import compute_time
from worker.profiling.compute_time import (
    SLOW,
    STEPS_KEPT,
    ComputeTimer,
    core_seconds,
    slowed_by_file,
)


class Clock:
    """A clock that moves only when the test works, waits or sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_core = 0.0
        self.waited = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def work(self, seconds: float, *, waits_s: float = 0.0) -> None:
        """Work, after a wait for a core."""
        self.now += seconds + waits_s
        self.on_core += seconds
        self.waited += waits_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    module = SimpleNamespace(perf_counter=lambda: made.now, sleep=made.advance)
    monkeypatch.setattr(compute_time, "time", module)
    monkeypatch.setattr(compute_time, "core_seconds", lambda: (made.on_core, made.waited))
    return made


def step(account: ComputeTimer, clock: Clock, *work_s: float) -> None:
    """Run one step with pieces of work, and as much waiting after each."""
    account.begin_step()
    for seconds in work_s:
        with account.piece("F"):
            clock.work(seconds)
        clock.advance(10.0)
    account.end_step()


def test_waits_do_not_count_as_compute_time(clock):
    account = ComputeTimer()
    for _ in range(STEPS_KEPT):
        step(account, clock, 1.0, 2.0, 0.5)
    assert account.typical_s == 3.5


def test_one_delayed_step_does_not_change_the_median(clock):
    account = ComputeTimer()
    for number in range(STEPS_KEPT):
        step(account, clock, 100.0 if number == 3 else 1.0)
    assert account.typical_s == 1.0


def test_no_compute_time_is_reported_for_the_first_steps(clock):
    account = ComputeTimer()
    for _ in range(STEPS_KEPT // 2):
        step(account, clock, 1.0)
    assert account.typical_s is None


def test_interrupted_work_counts_for_no_step(clock):
    account = ComputeTimer()
    for _ in range(STEPS_KEPT):
        account.begin_step()
        with account.piece("F"):
            clock.advance(50.0)  # The step does not end: a peer was lost.
        step(account, clock, 1.0)
    assert account.typical_s == 1.0


def test_slowdown_file_slows_one_node_while_it_exists(clock, tmp_path, monkeypatch):
    slow = tmp_path / "slow"
    monkeypatch.setenv(SLOW, str(slow))
    mine, other = (ComputeTimer(times_slower=slowed_by_file(f"{name}.1d0c.17")) for name in "ab")
    for account in (mine, other):
        step(account, clock, 1.0)
    slow.write_text("a 3.0\n")
    for account in (mine, other):
        for _ in range(STEPS_KEPT):
            step(account, clock, 1.0)
    assert (mine.typical_s, other.typical_s) == (3.0, 1.0)


def test_no_node_is_slowed_without_the_variable(monkeypatch):
    monkeypatch.delenv(SLOW, raising=False)
    assert slowed_by_file("a.1d0c.17") is None


def slowed(clock: Clock, *, waits_s: float = 0.0, for_peers_s: float = 0.0) -> float:
    """Return how long a second of work takes on a node three times slower."""
    account = ComputeTimer(times_slower=lambda: 3.0)
    account.begin_step()
    begin = clock.now
    with account.piece("F"):
        clock.work(1.0, waits_s=waits_s)
        clock.advance(for_peers_s)
    return clock.now - begin


def test_an_emulated_slower_node_is_not_slowed_by_shared_cores(clock):
    assert slowed(clock) == slowed(clock, waits_s=1.5) == 3.0
    assert slowed(clock, waits_s=5.0) == 6.0  # More than can be made up for.


def test_an_emulated_slower_node_is_not_slowed_by_shared_caches(clock):
    account, taken = ComputeTimer(times_slower=lambda: 3.0), []
    for seconds in (1.0, 1.5, 4.0):
        account.begin_step()
        begin = clock.now
        with account.piece("F"):
            clock.work(seconds)
        taken.append(clock.now - begin)
        account.end_step()
    assert taken == [3.0, 3.0, 4.0]


def test_a_slower_node_does_not_wait_longer_for_its_peers(clock):
    assert slowed(clock, for_peers_s=2.0) == 5.0


def test_seconds_on_a_core_are_those_of_this_thread():
    before, _ = core_seconds()
    deadline = time.thread_time() + 0.02
    while time.thread_time() < deadline:
        pass
    assert core_seconds()[0] - before == pytest.approx(0.02, rel=0.5)
