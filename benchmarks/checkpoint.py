"""What keeping copies of the state costs training: two processes, each with a whole replica.

    python -m benchmarks.checkpoint [--hidden N] [--layers N] [--sequence N] [--rounds N]

Blocks of steps take turns: without any copies; with a snapshot in memory at every step; the same
with one point of the block brought to disk by another process, as an agent does it; with one
synchronous ``torch.save`` in the block; with one ``async_save`` of torch's distributed checkpoints.
The medians over the rounds are compared. A *stall* is how long training stands still for one copy.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint

from simulator.families import build_model
from simulator.job import Job
from simulator.plan import Pipeline, Place, Plan, Stage
from worker import slots
from worker.data.synthetic import SyntheticTokens
from worker.keeping import Seat, SnapshotKeeper
from worker.rank import warm_up
from worker.restoring import flats_of
from worker.trainer import NoKeeper, Trainer
from worker.transport.processes import ProcessTransport

RANKS = 2
BLOCK = 10
"""Steps in a block; what is not done at every step is done in its first one."""
MODES = ("none", "memory", "persisted", "torch.save", "async_save")


@dataclass(eq=False)
class Bench:
    """One rank, and what it measures."""

    trainer: Trainer
    keeper: SnapshotKeeper
    folder: Path
    sealed: Callable[[str], None]
    stalls: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    blocks: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    work: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    """In processor time, which other processes of the machine disturb less."""
    _saving: Any = None

    def run(self, mode: str, number: int) -> None:
        """Train one block in one of the ways."""
        keeps = mode in ("memory", "persisted")
        self.trainer.keeper = self.keeper if keeps else NoKeeper()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        for step in range(BLOCK):
            self.trainer.step()
            if keeps:
                stalled_s = self.keeper.costs.stall_s or 0.0
                before_s = time.perf_counter()
                self.keeper.after_step()
                if step:
                    self.stalls[mode].append(stalled_s + time.perf_counter() - before_s)
            if step == 0 and mode == "persisted":
                self.keeper.snapshots.wait_sealed()
                self.sealed(str(self.trainer.progress.step))
            if step == 0 and mode in ("torch.save", "async_save"):
                before_s = time.perf_counter()
                self._save(mode, self.folder / f"{mode}-{number}")
                self.stalls[mode].append(time.perf_counter() - before_s)
        if keeps:
            self.keeper.snapshots.wait_sealed()
        if self._saving is not None:
            self._saving.result()
            self._saving = None
        self.blocks[mode].append(time.perf_counter() - begin_s)
        self.work[mode].append(time.process_time() - begin_cpu_s)

    def _save(self, mode: str, path: Path) -> None:
        state = {
            f"{layer}/{kind}": flat
            for layer, memory in self.trainer.memories.items()
            for kind, flat in enumerate(flats_of(memory))
        }
        if mode == "async_save":
            self._saving = checkpoint.async_save(state, checkpoint_id=path)
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
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args(arguments)
    model = build_model(
        "gpt2", layers=asked.layers, hidden=asked.hidden, heads=8, vocab=1024, tied=False
    )
    job = Job("bench", model, global_batch=8, sequence=asked.sequence, precision="fp32", max_tp=1)
    torch.set_num_threads(1)
    warm_up()
    with (
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
        processes.append(fork.Process(target=_be, args=arguments))
        processes[-1].start()
        theirs.close()
        lines.append(ours)
    found = _serve(lines, memory, disk)
    for process in processes:
        process.join()
    return found


def _serve(lines: list[Connection], memory: Path, disk: Path) -> dict[str, Any]:
    """Bring to disk what is sealed, as agents do, until the ranks have ended."""
    while True:
        for line in wait(lines):
            assert isinstance(line, Connection)
            said = line.recv()
            if isinstance(said, dict):
                return said
            rank, step = said
            folder = slots.point_folder(memory / str(rank), "bench", generation=1, step=int(step))
            for each in slots.sealed_files(folder):
                wanted = [piece for piece in each.header.pieces if piece.is_written]
                bodies = {piece.key: slots.read_piece(each.path, piece) for piece in wanted}
                path = slots.write_copy(disk / "uploaded" / str(rank), each.header, bodies)
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                path.unlink()
            line.send("done")


def _be(
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
    listening = {"master_listen_fd": server.detach()} if rank == 0 else {}
    store = distributed.TCPStore(
        host, port, is_master=rank == 0, wait_for_workers=False, **listening
    )
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    places = [(Place("cpu", "this", "here", node=str(number)),) for number in range(RANKS)]
    layers = (0, len(job.model.layers))
    pipelines = tuple(Pipeline(4, (Stage(layers, 1, place),)) for place in places)
    transport = ProcessTransport(store, rank, RANKS)
    data = SyntheticTokens(job.global_batch, job.sequence, job.model.vocab, 0)
    trainer = Trainer(job, Plan(1, pipelines), rank, transport, data)
    seat = Seat("bench", 1, 1, str(rank), memory / str(rank), 1, None, {})
    keeper = SnapshotKeeper.open(
        trainer, seat, transport, on_sealed=lambda _: None, reached=lambda _: None
    )
    (disk / "uploaded").mkdir(exist_ok=True)
    bench = Bench(trainer, keeper, disk, lambda step: line.send((rank, step)))
    for number in range(-1, rounds):
        for mode in MODES:
            bench.run(mode, number)
            if mode == "persisted":
                line.recv()  # What is still on its way is not the next block's.
        if number < 0:  # Libraries are loaded, files are there.
            bench.stalls, bench.blocks, bench.work = (
                {mode: [] for mode in MODES} for _ in range(3)
            )
    size = keeper.snapshots.template.total_bytes
    keeper.close()
    distributed.barrier()
    if rank == 0:
        told = {"stalls": bench.stalls, "blocks": bench.blocks, "work": bench.work}
        line.send({**told, "bytes": size})
    distributed.barrier()
    transport.close()
    distributed.destroy_process_group()


def _print(found: dict[str, Any]) -> None:
    step_s = statistics.median(found["blocks"]["none"]) / BLOCK
    print(f"{found['bytes'] / 1e6:.1f} MB for each process, {step_s * 1e3:.0f} ms a step without")
    print(f"{'':12}{'copies':>8}{'stall':>10}{'overhead':>10}{'processor':>11}")
    for mode in MODES[1:]:
        stall_s = statistics.median(found["stalls"][mode])
        often = BLOCK if mode in ("memory", "persisted") else 1
        overheads = [_overhead(found[kind], mode) for kind in ("blocks", "work")]
        widths = zip(overheads, (10, 11), strict=True)
        shown = "".join(f"{each:>{width}.1%}" for each, width in widths)
        print(f"{mode:12}{often:>5}/{BLOCK}{stall_s * 1e3:>8.1f}ms{shown}")


def _overhead(seconds: dict[str, list[float]], mode: str) -> float:
    """Each block is compared with that of its own round: machines are not always as quick."""
    return statistics.median(
        block / plain - 1 for block, plain in zip(seconds[mode], seconds["none"], strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
