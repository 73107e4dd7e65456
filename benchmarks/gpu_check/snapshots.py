"""What snapshots cost training: the stall of a step, and how long copy and seal run beside it."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.model import llama_job, trainer_for
from benchmarks.gpu_check.setting import Setting, SkippedError, finish
from worker.checkpoint.free_space import free_bytes
from worker.checkpoint.load_state import bit_sums
from worker.checkpoint.placement import state_shape
from worker.checkpoint.snapshot_file import NoRoomError
from worker.checkpoint.snapshots.snapshot_manager import SnapshotManager, SnapshotTarget
from worker.distributed.single_rank import SingleRankTransport
from worker.training.snapshot_hook import NoSnapshots

FILES = 2
BYTES = 12
"""Bytes of a snapshot for each parameter: master and two moments in fp32."""


def run(setting: Setting) -> dict[str, Any]:
    """Train with a snapshot after each step, and without."""
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else setting.out
    job = llama_job(setting, layers=6)
    needed = FILES * BYTES * sum(layer.parameters(1) for layer in job.model.layers)
    if free_bytes(memory) < 1.1 * needed:
        room = free_bytes(memory) / 2**30
        raise SkippedError(f"{memory} has {room:.1f} GiB free, and {needed / 2**30:.1f} are needed")
    folder = memory / f"sailor-gpu-check-{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        return _measure(setting, job, folder)
    except NoRoomError as error:
        raise SkippedError(str(error)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(setting: Setting, job: Any, folder: Path) -> dict[str, Any]:
    place = setting.place
    trainer = trainer_for(setting, job)
    plain = _steps(trainer, place, 1, setting.rounds, None)
    each = _train_with_snapshots(trainer, place, folder, 1, setting.rounds)
    busy_s = sum(each[name] or 0.0 for name in ("copy_s", "checksum_and_seal_s"))
    # A snapshot waits until the one before is sealed, so only rare ones show what one costs.
    every = int(busy_s / plain) + 3
    rare = _train_with_snapshots(trainer, place, folder, every, max(2, setting.rounds // 3))
    stall_s = max((rare["step_s"] - plain) * every, 0.0)
    copy_s = rare["copy_s"]
    return {
        "bytes": rare["bytes"],
        "step_s": plain,
        "step_s_with_a_snapshot_each": each["step_s"],
        "a_snapshot_every_steps": every,
        "step_s_then": rare["step_s"],
        "stall_of_a_snapshot_s": stall_s,
        "copy_s": copy_s,
        "copy_gbytes_per_s": rare["bytes"] / copy_s / 1e9 if copy_s else None,
        "checksum_and_seal_s": rare["checksum_and_seal_s"],
        "hidden_share": 1 - min(stall_s / (copy_s + rare["checksum_and_seal_s"]), 1.0)
        if copy_s
        else None,
        "adding_all_bits_s": _add_bits_s(trainer, place, setting.rounds),
    }


def _add_bits_s(trainer: Any, place: Any, rounds: int) -> float:
    """Return the seconds that adding the bits of all state takes, to compare replicas."""
    seconds = []
    for _ in range(2 + rounds):
        finish(place)
        begin_s = time.perf_counter()
        bit_sums(trainer.buffers, state_shape(trainer.job), zero=0)
        finish(place)
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds[2:])


def _train_with_snapshots(
    trainer: Any, place: Any, folder: Path, every: int, rounds: int
) -> dict[str, Any]:
    """Train with a snapshot each ``every`` steps; return the mean step and the snapshot's times."""
    moments: list[tuple[str, float]] = []
    target = SnapshotTarget(
        job="gpu-check", generation=every, term=1, node="here", memory=folder, memory_every=every,
        persist_every=None, zones={"here": "here"},
    )  # fmt: skip
    (folder / target.job).mkdir(exist_ok=True)
    snapshots = SnapshotManager.open(
        trainer, target, SingleRankTransport(),
        on_milestone=lambda name: moments.append((name, time.perf_counter())),
    )  # fmt: skip
    trainer.snapshot_hook = snapshots
    try:
        step_s = _steps(trainer, place, every, rounds, snapshots)
        snapshots.writer.wait_sealed()
        size = snapshots.writer.template.total_bytes
    finally:
        snapshots.close()
        trainer.snapshot_hook = NoSnapshots()
        shutil.rmtree(folder / target.job)
    return {
        "bytes": size,
        "step_s": step_s,
        "copy_s": _median_between(moments, "copying", "copied"),
        "checksum_and_seal_s": _median_between(moments, "copied", "sealed"),
    }


def _steps(trainer: Any, place: Any, every: int, rounds: int, snapshots: Any) -> float:
    """Return the seconds of a step: the median over rounds of ``every`` steps each."""
    seconds = []
    for number in range(2 + rounds):
        finish(place)
        begin_s = time.perf_counter()
        for _ in range(every):
            trainer.step()
            if snapshots is not None:
                snapshots.after_step()
        finish(place)
        seconds += [time.perf_counter() - begin_s] if number >= 2 else []
    return statistics.median(seconds) / every


def _median_between(moments: list[tuple[str, float]], begin: str, end: str) -> float | None:
    begins = [at for name, at in moments if name == begin]
    ends = [at for name, at in moments if name == end]
    found = [b - a for a, b in zip(begins, ends, strict=False)]
    return statistics.median(found) if found else None
