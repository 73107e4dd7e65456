"""Snapshot files are reused when unneeded, kept when linked, and never truncated."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from agents.snapshots.replication import PATIENCE_S
from sailord.core.model.options import Options
from simulator.spec.job import Checkpoint
from tests.worker.checkpoint.test_load_state import JOBS
from tests.worker.threads import run_as_threads
from tests.worker.training_runs import SomeLabels, alone, plan_of
from worker.checkpoint import snapshot_file
from worker.checkpoint.snapshots import snapshot_manager
from worker.checkpoint.snapshots.snapshot_manager import SnapshotManager, SnapshotTarget, header_of
from worker.checkpoint.snapshots.snapshot_writer import SEAL_BYTES_PER_S, SnapshotWriter
from worker.distributed.single_rank import SingleRankTransport
from worker.profiling.fault_injection import Milestone
from worker.training.trainer import RankTrainer

JOB = JOBS["tied"]


@pytest.fixture
def keeper(tmp_path: Path):
    """The snapshot manager of a single rank."""
    transport = SingleRankTransport()
    trainer = RankTrainer(JOB, alone(JOB), 0, transport, SomeLabels(JOB))
    target = SnapshotTarget("j", 1, 1, "n", tmp_path, 1, 4, {})
    found = SnapshotManager.open(trainer, target, transport)
    trainer.snapshot_hook = found
    yield found
    found.close()


def train(keeper: SnapshotManager, steps: int) -> None:
    train_unsealed(keeper, steps)
    keeper.writer.wait_sealed()


def train_unsealed(keeper: SnapshotManager, steps: int) -> None:
    for _ in range(steps):
        keeper.trainer.step()
        keeper.after_step()


def sealed(memory: Path) -> dict[int, snapshot_file.SealedFile]:
    """Return the sealed files by step, with their checksums verified."""
    found = {
        step: each
        for _, _, step, folder in snapshot_file.point_folders(memory)
        for each in snapshot_file.sealed_files(folder)
    }
    for step, each in found.items():
        assert each.header.step == each.header.progress.step == step
        for piece in each.header.pieces:
            snapshot_file.read_piece(each.path, piece)
    return found


def test_rank_that_waits_for_its_seal_reports_that_activity(keeper, monkeypatch):
    """Peers that wait for it ask for its activity."""
    train_unsealed(keeper, 1)
    seen, recorder = [], keeper.trainer.recorder
    monkeypatch.setattr(keeper.writer, "wait_sealed", lambda: seen.append(recorder.activity_text))
    recorder.at_step(1)
    keeper.wants_to_stop(1)
    assert seen == ["in snapshot of step 1"]


def test_two_files_suffice_without_replicas(keeper, tmp_path):
    train(keeper, 7)
    found = sealed(tmp_path)
    assert set(found) == {6, 7}
    assert [found[step].header.persist for step in (6, 7)] == [False, False]
    assert list(snapshot_file.unfinished_files(tmp_path)) == []
    train(keeper, 1)
    assert sealed(tmp_path)[8].header.persist


def test_linked_file_is_not_overwritten(keeper, tmp_path):
    train(keeper, 3)
    held = tmp_path / "held.snap"
    os.link(sealed(tmp_path)[3].path, held)
    before = held.read_bytes()
    train(keeper, 5)
    assert held.read_bytes() == before
    assert set(sealed(tmp_path)) == {7, 8}


def test_file_removed_by_the_agent_is_replaced(keeper, tmp_path):
    train(keeper, 3)
    for found in sealed(tmp_path).values():
        found.path.unlink()
    train(keeper, 3)
    assert set(sealed(tmp_path)) == {5, 6}


def test_close_after_a_failed_copy_removes_its_file(keeper, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(keeper.writer._copier, "copy", fail)
    train_unsealed(keeper, 1)
    with pytest.raises(RuntimeError, match="CUDA error"):
        keeper.writer.wait_sealed()
    keeper.close()
    assert list(snapshot_file.unfinished_files(tmp_path)) == []


def test_room_for_one_file_is_too_little(tmp_path, monkeypatch):
    hasty = partial(SnapshotWriter, room_wait_s=0.0)
    monkeypatch.setattr(snapshot_manager, "SnapshotWriter", hasty)
    transport = SingleRankTransport()
    trainer = RankTrainer(JOB, alone(JOB), 0, transport, SomeLabels(JOB))
    target = SnapshotTarget("j", 1, 1, "n", tmp_path, 1, None, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(
            snapshot_file.NoRoomError, match=r"1 files at once: .* MiB are needed"
        ) as raised:
            SnapshotManager.open(trainer, target, transport)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.filename == str(tmp_path)
    assert list(snapshot_file.unfinished_files(tmp_path)) == []


@pytest.mark.parametrize(("needed", "complete"), [(frozenset(), 1), (None, 0)])
def test_second_file_is_made_once_the_first_snapshot_is_complete(
    tmp_path, monkeypatch, needed, complete
):
    """Where what past generations left fills the memory, until the agent deletes that."""
    told, create = [], snapshot_file.create

    def create_if_told(path: Path, size: int) -> int:
        if list(snapshot_file.point_folders(tmp_path)) and not told:
            raise snapshot_file.NoRoomError.of(errno.ENOSPC, "full", tmp_path, size)
        return create(path, size)

    monkeypatch.setattr(snapshot_file, "create", create_if_told)
    transport = SingleRankTransport()
    trainer = RankTrainer(JOB, alone(JOB), 0, transport, SomeLabels(JOB))
    target = SnapshotTarget("j", 1, 1, "n", tmp_path, 1, None, {}, needed)
    keeper = SnapshotManager.open(
        trainer, target, transport, on_no_room=lambda *each: told.append(each), all_at_once=False
    )
    trainer.snapshot_hook = keeper
    assert len(list(snapshot_file.unfinished_files(tmp_path))) == 1
    train(keeper, 1)
    assert told == []
    train(keeper, 1)
    assert told == [(keeper.writer.template.total_bytes, complete)]
    assert set(sealed(tmp_path)) == {1, 2}
    keeper.close()


def test_update_waits_for_the_copy_of_the_state_before_it(keeper, tmp_path):
    train(keeper, 1)
    first = {
        p.key: snapshot_file.read_piece(sealed(tmp_path)[1].path, p) for p in _pieces(tmp_path, 1)
    }
    keeper.trainer.step()
    keeper.after_step()
    keeper.trainer.step()  # Would change the buffers during the copy.
    keeper.writer.wait_sealed()
    second = {
        p.key: snapshot_file.read_piece(sealed(tmp_path)[2].path, p) for p in _pieces(tmp_path, 2)
    }
    again = RankTrainer(JOB, alone(JOB), 0, SingleRankTransport(), SomeLabels(JOB))
    again.step()
    again.step()
    master = again.buffers[1].unsplit_part(again.buffers[1].master)
    body = second[1, JOB.max_tp]
    assert body[: master.numel() * 4] == master.numpy().tobytes()
    assert first != second


def _pieces(memory: Path, step: int):
    return [piece for piece in sealed(memory)[step].header.pieces if piece.bytes]


@pytest.mark.parametrize(("survive", "buddies"), [("node", {"c"}), ("zone", {"b"})])
def test_header_names_buddies_by_what_the_job_must_survive(tmp_path, survive, buddies):
    job = replace(JOB, checkpoint=Checkpoint(survive=survive))
    last = len(job.model.layers)
    plan = plan_of(job.global_batch, (1, [(0, 1, 1), (1, 2, 1), (2, last, 1)]))
    (line,) = plan.pipelines
    stages = tuple(
        replace(stage, places=(replace(stage.places[0], node=node),))
        for stage, node in zip(line.stages, "abc", strict=True)
    )
    plan = replace(plan, pipelines=(replace(line, stages=stages),))
    zones = {"a": "x", "b": "y", "c": "x"}

    def body(transport):
        trainer = RankTrainer(job, plan, transport.rank, transport, SomeLabels(job))
        header, _ = header_of(
            trainer, SnapshotTarget("j", 1, 1, "abc"[transport.rank], tmp_path, 1, 4, zones)
        )
        return {piece.buddy for piece in header.pieces if piece.is_written}

    assert run_as_threads(3, body)[0] == buddies


def test_waits_of_a_step_are_shorter_than_the_stall_limit():
    """Waiting for a replica, and then for room in a full memory."""
    assert PATIENCE_S + SnapshotWriter.room_wait_s < min(Options().stall_s, Options().stop_s)


# ---- what is left to seal after a loss ----------------------------------------------------------


class Gate:
    """Lets no snapshot be sealed while it is closed."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()

    def __call__(self, milestone: Milestone) -> None:
        if milestone == "sealing":
            self.is_open.wait()


@pytest.fixture
def gated(tmp_path: Path):
    """The snapshot manager of a single rank, and the gate before its seals."""
    transport, gate = SingleRankTransport(), Gate()
    trainer = RankTrainer(JOB, alone(JOB), 0, transport, SomeLabels(JOB))
    target = SnapshotTarget("j", 1, 1, "n", tmp_path, 2, None, {})
    found = SnapshotManager.open(trainer, target, transport, on_milestone=gate)
    trainer.snapshot_hook = found
    yield found, gate
    gate.is_open.set()
    found.close()


NOBODY: frozenset[int] = frozenset()


def test_nothing_is_left_to_seal_at_a_step_that_is_sealed(gated):
    keeper, _ = gated
    train(keeper, 2)
    assert keeper.expected_seal(rolls_forward=False, lost=NOBODY) is None


def test_seal_of_a_step_without_a_snapshot_takes_as_long_as_the_last_one(gated):
    keeper, gate = gated
    by_bytes = keeper.writer.template.total_bytes / SEAL_BYTES_PER_S
    train(keeper, 1)
    assert keeper.expected_seal(rolls_forward=False, lost=NOBODY) == (1, by_bytes)
    gate.is_open.clear()
    keeper.trainer.step()
    keeper.after_step()
    time.sleep(0.05)
    gate.is_open.set()
    train(keeper, 1)
    step, seconds = keeper.expected_seal(rolls_forward=False, lost=NOBODY)
    assert step == 3
    assert seconds >= 0.05


def test_step_that_may_be_rolled_forward_is_the_one_that_is_left(gated):
    keeper, _ = gated
    train(keeper, 2)
    step, _ = keeper.expected_seal(rolls_forward=True, lost=NOBODY)
    assert step == 3


def test_piece_that_the_lost_rank_alone_kept_leaves_nothing_new_to_seal(gated):
    keeper, _ = gated
    train(keeper, 1)
    assert keeper.expected_seal(rolls_forward=False, lost=frozenset({0})) is None


def test_snapshot_under_way_is_expected_whichever_rank_is_lost(gated):
    keeper, gate = gated
    gate.is_open.clear()
    train_unsealed(keeper, 2)
    keeper.trainer.update_complete = False
    step, seconds = keeper.expected_seal(rolls_forward=False, lost=frozenset({0}))
    assert step == 2
    assert seconds > 0
    gate.is_open.set()
    keeper.writer.wait_sealed()
    assert keeper.expected_seal(rolls_forward=False, lost=frozenset({0})) is None
