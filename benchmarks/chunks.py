"""How long a step takes with one and with several chunks of layers on each rank.

    python -m benchmarks.chunks [--groups N] [--hidden N] [--pass-ms N] [--rounds N]

One pipeline trains the same layers under 1F1B and under interleaved plans, in the same processes of
this machine over its loopback, a step of each in turn, so that other load affects all alike. Each
pass is prolonged by a sleep to one length, divided by the chunks, so that ranks do not wait for
each other's core. Beside the measured ratio stands that of messages and sums that take no time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from sailord.text.table import table
from simulator.models.families import build_model
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage, equal_cuts
from worker.data.sources.synthetic import SyntheticTokens
from worker.distributed.process_groups import ProcessTransport
from worker.profiling.compute_time import ComputeTimer
from worker.training.trainer import RankTrainer

FIRST_ROUNDS = 3
"""Warm-up steps, not counted."""
CHUNKS = (1, 2, 4)
PLACE = (Place("cpu", "this", "here"),)


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """A pipeline with some number of micro batches."""

    groups: int
    micro_batches: int
    hidden: int
    pass_s: float
    rounds: int

    def job(self) -> Job:
        blocks = max(CHUNKS) * self.groups
        model = build_model(
            "gpt2", layers=blocks, hidden=self.hidden, heads=4, vocab=64, sequence=64, tied=False
        )
        return Job("chunks", model, global_batch=self.micro_batches, sequence=64, precision="fp32")

    def plan(self, chunks: int) -> Plan:
        """Equal blocks in each chunk; embedding and head are small."""
        cuts = equal_cuts(max(CHUNKS) * self.groups, chunks * self.groups)
        ends = [0, *(end + 1 for end in cuts[1:-1]), cuts[-1] + 2]
        stages = tuple(Stage((a, b), 1, PLACE) for a, b in pairwise(ends))
        schedule = ("1f1b" if chunks == 1 else "interleaved", chunks)
        return Plan(1, (Pipeline(self.micro_batches, stages),), *schedule)  # type: ignore[arg-type]  # one of the literals

    def ideal(self, chunks: int) -> float:
        """The ratio to 1F1B if messages and sums took no time."""
        return (self.micro_batches + (self.groups - 1) / chunks) / (
            self.micro_batches + self.groups - 1
        )


class EqualPasses(ComputeTimer):
    """Prolongs each piece of work to the same time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(times_slower=lambda: 2.0)
        self._seconds = seconds

    def _slow_down(self) -> None:
        assert isinstance(self._begun, float)
        time.sleep(max(self._begun + self._seconds - time.perf_counter(), 0.0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time steps with several chunks on each rank.")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--pass-ms", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for times in (1, 2, 4):
        size = (asked.hidden, asked.pass_ms / 1e3, asked.rounds)
        run = PipelineRun(asked.groups, asked.groups * times, *size)
        found = dict(zip(CHUNKS, measured(run), strict=True))
        for chunks, seconds in found.items():
            figures = (seconds, seconds / found[1], run.ideal(chunks))
            rows.append([str(run.micro_batches), str(chunks), *(f"{x:.3f}" for x in figures)])
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(table(("micro batches", "chunks", "median s", "of 1F1B", "ideal"), rows))
    return 0


def measured(run: PipelineRun) -> list[float]:
    """The median step with each number of chunks."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run_rank, args=(rank, run, Path(folder), answers))
            for rank in range(run.groups)
        ]
        for process in processes:
            process.start()
        found: list[float] = answers.get()
        for process in processes:
            process.join()
    return found


def _run_rank(rank: int, run: PipelineRun, folder: Path, answers: Any) -> None:
    torch.set_num_threads(1)
    job = run.job()
    data = SyntheticTokens(job.global_batch, job.sequence, job.model.vocab, 0)
    trainers = []
    for chunks in CHUNKS:
        store = FileStore(str(folder / f"store{chunks}"), run.groups)
        transport = ProcessTransport(store, rank, run.groups)
        timer = EqualPasses(run.pass_s / chunks)
        trainers.append(RankTrainer(job, run.plan(chunks), rank, transport, data, busy=timer))
    seconds: list[list[float]] = [[] for _ in CHUNKS]
    for _ in range(FIRST_ROUNDS + run.rounds):
        for number, trainer in enumerate(trainers):
            begin = time.perf_counter()
            trainer.step()  # Its vote ends on all ranks together.
            seconds[number].append(time.perf_counter() - begin)
    if rank == 0:
        answers.put([statistics.median(each[FIRST_ROUNDS:]) for each in seconds])


if __name__ == "__main__":
    sys.exit(main())
