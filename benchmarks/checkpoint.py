"""What snapshots and checkpoints cost training: two processes, each with a whole replica.

    python -m benchmarks.checkpoint [--hidden N] [--layers N] [--sequence N] [--rounds N]

Compares methods at the same frequency, in blocks of steps that take turns: a copy at every step
(blocks of 10), and one copy in 50 steps. The methods: none; a snapshot in memory; a snapshot that
another process writes to disk, as an agent does, from a hard link; ``torch.save``; ``async_save``
of torch's distributed checkpoints; and a snapshot at each of 50 steps of which one is written to
disk.

A *stall* is how long training waits for one copy, for any reason. Medians over the rounds; each
block is compared with the block without copies of the same round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed
from torch._C._distributed_c10d import TCPStore
from torch.distributed.checkpoint.state_dict_saver import async_save

from agents.snapshots.upload import upload_pieces
from benchmarks.machine import report_stolen_time
from sailord.text.table import table
from simulator.models.families import build_model
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from worker.checkpoint import snapshot_file
from worker.checkpoint.load_state import flat_states
from worker.checkpoint.snapshots.snapshot_manager import SnapshotManager, SnapshotTarget
from worker.checkpoint.snapshots.stall_stats import StallStats
from worker.control.preload import preload
from worker.data.sources.synthetic import SyntheticTokens
from worker.distributed.process_groups import ProcessTransport
from worker.training.snapshot_hook import NoSnapshots
from worker.training.trainer import RankTrainer

RANKS = 2


@dataclass(frozen=True, slots=True)
class Method:
    """One way to keep copies, and how often."""

    kind: Literal["none", "memory", "persisted", "both", "torch.save", "async_save"]
    steps: int
    """Steps of a block."""
    copies: int
    """Copies in a block: one at its first step, or one at each."""

    @property
    def is_kept(self) -> bool:
        """Whether Sailor's own snapshots are taken."""
        return self.kind in ("memory", "persisted", "both")

    @property
    def is_persisted(self) -> bool:
        return self.kind in ("persisted", "both")


OFTEN = tuple(
    Method(kind, 10, 0 if kind == "none" else 10)
    for kind in ("none", "memory", "torch.save", "async_save")
)
SELDOM = (
    Method("none", 50, 0),
    Method("memory", 50, 1),
    Method("persisted", 50, 1),
    Method("both", 50, 50),
    Method("torch.save", 50, 1),
    Method("async_save", 50, 1),
)
Seconds = dict[Method, list[float]]


@dataclass(eq=False)
class TimedSnapshots(SnapshotManager):
    """Takes snapshots at the steps that a block asks for."""

    due: range = range(0)
    persisted: int | None = None

    def is_kept(self, step: int) -> bool:
        return step in self.due

    def _is_persisted(self, step: int) -> bool:
        return step == self.persisted


@dataclass(eq=False)
class Bench:
    """One rank, and what it measures."""

    trainer: RankTrainer
    snapshots: TimedSnapshots
    folder: Path
    wait_brought: Callable[[], object]
    """Wait until the other process has written the snapshots meant for disk."""
    stalls: Seconds = field(default_factory=lambda: defaultdict(list))
    blocks: Seconds = field(default_factory=lambda: defaultdict(list))
    work: Seconds = field(default_factory=lambda: defaultdict(list))
    """Processor seconds, which other processes of the machine disturb less."""
    _saving: Any = None

    def run(self, method: Method, steps: int) -> None:
        """Train one block in one of the ways."""
        first = self.trainer.progress.step + 1
        last = first if method.copies == 1 else first + steps - 1
        snapshots, saves = self.snapshots, range(first, last + 1) if method.copies else range(0)
        snapshots.due = saves if method.is_kept else range(0)
        snapshots.persisted = first if method.is_persisted else None
        snapshots.stalls = StallStats(needs_replicas=False)
        self.trainer.snapshot_hook = snapshots if method.is_kept else NoSnapshots()
        stalls = []
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        for step in range(first, first + steps):
            self.trainer.step()
            if method.is_kept:
                snapshots.after_step()
            elif step in saves:
                before_s = time.perf_counter()
                self._save(method, self.folder / method.kind)
                stalls.append(time.perf_counter() - before_s)
        self._wait_saved()
        snapshots.writer.wait_sealed()
        if method.is_persisted:
            self.wait_brought()
        self.blocks[method].append(time.perf_counter() - begin_s)
        self.work[method].append(time.process_time() - begin_cpu_s)
        if method.is_kept and snapshots.stalls.stall_s is not None:
            stalls = [snapshots.stalls.stall_s]
        if stalls:
            self.stalls[method].append(statistics.fmean(stalls))

    def _wait_saved(self) -> None:
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def _save(self, method: Method, path: Path) -> None:
        self._wait_saved()
        state = {
            f"{layer}/{kind}": flat
            for layer, memory in self.trainer.buffers.items()
            for kind, flat in enumerate(flat_states(memory))
        }
        if method.kind == "async_save":
            self._saving = async_save(state, checkpoint_id=path)
        elif self.trainer.rank == 0:
            with path.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description="Say what copies of the state cost training.")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args(arguments)
    model = build_model(
        "gpt2", layers=asked.layers, hidden=asked.hidden, heads=8, vocab=1024, tied=False
    )
    job = Job("bench", model, global_batch=8, sequence=asked.sequence, precision="fp32", max_tp=1)
    torch.set_num_threads(1)
    preload()
    with (
        report_stolen_time(),
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory() as disk,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        found = _measure(job, Path(memory), Path(disk), server, asked.rounds)
    _print(found)
    return 0


def _measure(
    job: Job, memory: Path, disk: Path, server: socket.socket, rounds: int
) -> dict[str, Any]:
    fork = multiprocessing.get_context("fork")
    lines, processes = [], []
    for rank in range(RANKS):
        ours, theirs = fork.Pipe()
        arguments = (job, rank, server, memory, disk, rounds, theirs)
        processes.append(fork.Process(target=_run_rank, args=arguments))
        processes[-1].start()
        theirs.close()
        lines.append(ours)
    found = _serve(lines, memory, disk)
    for process in processes:
        process.join()
    return found


def _serve(lines: list[Connection], memory: Path, disk: Path) -> dict[str, Any]:
    """Write sealed snapshots to disk, as agents do, until the ranks have ended."""
    while True:
        for line in wait(lines):
            assert isinstance(line, Connection)
            said = line.recv()
            if isinstance(said, dict):
                return said
            rank, step = said
            _persist(memory / str(rank), step, f"file://{disk}/brought/{rank}/{step}")
            line.send("done")


def _persist(memory: Path, step: int, to: str) -> None:
    """Hold the files of a point by links, so that the worker may delete them, and write them."""
    folder = snapshot_file.point_folder(memory, "bench", generation=1, step=step)
    for each in snapshot_file.sealed_files(folder):
        held = memory / f"held-{each.path.name}"
        held.hardlink_to(each.path)
        keys = [piece.key for piece in each.header.pieces if piece.is_written]
        upload_pieces(
            f"{to}/{each.path.name}", held, snapshot_file.partial_header(each.header, keys)
        )
        held.unlink()


def _run_rank(
    job: Job,
    rank: int,
    server: socket.socket,
    memory: Path,
    disk: Path,
    rounds: int,
    line: Connection,
) -> None:
    warnings.simplefilter("ignore")
    host, port = server.getsockname()
    taken = server.detach() if rank == 0 else None
    store = TCPStore(
        host, port, is_master=rank == 0, wait_for_workers=False, master_listen_fd=taken
    )
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    places = [(Place("cpu", "this", "here", node=str(number)),) for number in range(RANKS)]
    layers = (0, len(job.model.layers))
    pipelines = tuple(Pipeline(4, (Stage(layers, 1, place),)) for place in places)
    transport = ProcessTransport(store, rank, RANKS)
    data = SyntheticTokens(job.global_batch, job.sequence, job.model.vocab, 0)
    trainer = RankTrainer(job, Plan(1, pipelines), rank, transport, data)
    target = SnapshotTarget("bench", 1, 1, str(rank), memory / str(rank), 1, None, {})

    def sealed(step: int) -> None:
        if step == snapshots.persisted:
            line.send((rank, step))

    snapshots = TimedSnapshots.open(
        trainer, target, transport, on_sealed=sealed, on_milestone=lambda _: None
    )
    bench = Bench(trainer, snapshots, disk, line.recv)
    for method in SELDOM:  # Libraries are loaded, files are there.
        bench.run(method, 2)
    for seconds in (bench.stalls, bench.blocks, bench.work):
        seconds.clear()
    for _ in range(rounds):
        for method in (*OFTEN, *SELDOM):
            bench.run(method, method.steps)
    size = snapshots.writer.template.total_bytes
    snapshots.close()
    distributed.barrier()
    if rank == 0:
        told = {"stalls": bench.stalls, "blocks": bench.blocks, "work": bench.work}
        line.send({**{name: dict(each) for name, each in told.items()}, "bytes": size})
    distributed.barrier()
    transport.close()
    distributed.destroy_process_group()


def _print(found: dict[str, Any]) -> None:
    plain = OFTEN[0]
    step_s = statistics.median(found["blocks"][plain]) / plain.steps
    print(f"{found['bytes'] / 1e6:.1f} MB for each process, {step_s * 1e3:.0f} ms a step without")
    for methods, often in ((OFTEN, "a copy at every step"), (SELDOM, "in 50 steps")):
        rows, (none, *others) = [], methods
        for method in others:
            stall_s = statistics.median(found["stalls"][method])
            overheads = (_overhead(found[kind], method, none) for kind in ("blocks", "work"))
            shown = [f"{stall_s * 1e3:.1f} ms", *(f"{each:.1%}" for each in overheads)]
            rows.append([NAMES[method.kind], str(method.copies), *shown])
        print(table((often, "copies", "stall", "overhead", "processor"), rows))
    for ours, theirs in ((OFTEN[1], OFTEN[2:]), (SELDOM[2], SELDOM[4:])):
        stalls = {method: statistics.median(found["stalls"][method]) for method in (ours, *theirs)}
        told = ", ".join(
            f"{stalls[ours] / stalls[method]:.1%} of {method.kind}'s" for method in theirs
        )
        print(f"stall of {NAMES[ours.kind]}, {ours.copies} in {ours.steps} steps: {told}")


NAMES = {
    "memory": "in memory",
    "persisted": "persisted",
    "both": "each, one persisted",
    "torch.save": "torch.save",
    "async_save": "async_save",
}


def _overhead(seconds: Seconds, method: Method, none: Method) -> float:
    """Each block is compared with that of its own round: machines are not always as quick."""
    pairs = zip(seconds[method], seconds[none], strict=True)
    return statistics.median(block / plain - 1 for block, plain in pairs)


if __name__ == "__main__":
    sys.exit(main())
