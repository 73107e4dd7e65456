"""Snapshot stalls, from the worker's step to the controller's interval."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.protocol.codec import read
from agents.protocol.records import Report, Saving
from agents.workers.status import WorkerStatus, combine
from sailord.core.model.phases import Running
from sailord.core.queries.snapshot_intervals import intervals_now
from tests.sailord.core.states import (
    BEGAN,
    A,
    active_of,
    generation,
    job,
    node,
    proposal,
    report,
    state,
)
from tests.worker.training_runs import SomeLabels, alone, small_job
from worker.checkpoint import snapshot_file
from worker.checkpoint.snapshots import snapshot_writer
from worker.control.assignment import Assignment, OpenJob
from worker.control.generation import GenerationRun

SLOW_S = 0.2
STEPS = 14


def lived(memory: Path, *, every: int) -> list[WorkerStatus]:
    """Return all statuses of a worker that trains one generation alone."""
    spec: dict[str, Any] = {
        "job": "j", "generation": 1, "term": 1, "rank": 0, "ranks": 1, "device": 0, "node": "n",
        "host": "127.0.0.1", "folder": str(memory / "gone" / "0"), "memory": str(memory),
        "memory_every": every, "persist_every": None, "peers": {}, "ticket": "", "manifest": None,
        "threads": 1, "restore": {"step": 0, "generation": 0, "source": "start"},
    }  # fmt: skip
    words = []

    def say(word: dict[str, Any], _: bool) -> None:
        words.append(read(WorkerStatus, {**word, "phases": list(word["phases"])}))
        if word["taking"] in {"stopped", "failed"}:
            run.end()

    trained = replace(small_job("gpt2", tied=True), steps=STEPS)
    run = GenerationRun(Assignment(spec), say)
    assert run.run(lambda _: OpenJob(trained, alone(trained), SomeLabels(trained), None))
    assert [word.failure for word in words if word.failure] == []
    return words


def told(words: list[WorkerStatus]) -> Report:
    """Return the agent's report after the worker's last status of training."""
    measured = combine(
        [next(word for word in reversed(words) if word.taking == "running")]
    ).measured
    return report(A, stall_s=measured.stall_s, late_s=measured.late_s, settle_s=measured.settle_s)


def chosen(said: Report, *, every: int, step_s: float) -> int:
    """How often the next generation takes snapshots."""
    record = generation(A, memory_every=every)
    about = {"job": job(saving=Saving()), "generation": record, "step_s": step_s}
    now = state(Running(BEGAN), node(A, said), **about)
    return intervals_now(now, active_of(now), proposal(iteration_s=step_s)).memory_every


def slowed(monkeypatch: pytest.MonkeyPatch, module: Any, what: str, *, waited_for_by: str) -> None:
    """Let ``what`` take ``SLOW_S`` longer, counted from when training waits for it."""
    plain = getattr(module, what)
    plain_wait = getattr(snapshot_writer.SnapshotWriter, waited_for_by)
    waits = threading.Event()

    def slow(*arguments: Any) -> Any:
        waits.clear()
        waits.wait(1.0)
        time.sleep(SLOW_S)
        return plain(*arguments)

    def wait(self: snapshot_writer.SnapshotWriter) -> None:
        waits.set()
        plain_wait(self)

    monkeypatch.setattr(module, what, slow)
    monkeypatch.setattr(snapshot_writer.SnapshotWriter, waited_for_by, wait)


@pytest.mark.slow
def test_steps_without_a_snapshot_do_not_lower_its_cost(tmp_path, monkeypatch):
    slowed(monkeypatch, snapshot_writer.SnapshotCopier, "copy", waited_for_by="wait_copied")
    said = told(lived(tmp_path, every=10))
    assert said.stall_s is not None
    assert said.stall_s > SLOW_S / 2
    assert chosen(said, every=10, step_s=1.0) > 3


@pytest.mark.slow
def test_waiting_for_the_last_snapshot_counts_as_stall(tmp_path, monkeypatch):
    slowed(monkeypatch, snapshot_file, "seal", waited_for_by="wait_sealed")
    said = told(lived(tmp_path, every=1))
    assert said.late_s is not None
    assert said.late_s > SLOW_S / 2
    assert said.stall_s >= said.late_s
    assert said.settle_s >= SLOW_S
    # Each step waited for the last one's snapshot.
    assert chosen(said, every=1, step_s=SLOW_S / 2 + said.stall_s) >= 2


def test_unmeasured_snapshot_times_are_not_reported(tmp_path):
    every = STEPS + 1  # A snapshot of the last step might settle before that step is reported.
    said = told(lived(tmp_path, every=every))
    assert (said.stall_s, said.late_s, said.settle_s) == (None, None, None)
    assert chosen(said, every=every, step_s=1.0) == every
