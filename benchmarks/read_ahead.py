"""Compares steps with and without samples loaded ahead.

    python -m benchmarks.read_ahead [--hidden N] [--rounds N]

One rank trains the same job three times: on data that costs almost nothing, on data whose loading
waits (for a disk, or another machine) and on data whose loading computes in Python, each for about
as long as the passes take. A step with and a step without reading ahead take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sailord.text.table import table
from simulator.models.families import build_model
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from worker.data.batch import DataSource, Samples
from worker.data.sources.synthetic import SyntheticTokens
from worker.distributed.single_rank import SingleRankTransport
from worker.training.trainer import RankTrainer

MICRO_BATCHES, SIZE, SEQUENCE = 8, 2, 128
FIRST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Costly:
    """Samples that take time to load."""

    source: DataSource
    spend: Callable[[], object]

    def batch(self, step: int, positions: Sequence[int]) -> Samples:
        self.spend()
        return self.source.batch(step, positions)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time steps with and without reading ahead.")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = build_model("gpt2", layers=6, hidden=asked.hidden, heads=8, vocab=1024)
    batch = SIZE * MICRO_BATCHES
    job = Job("benchmark", model, global_batch=batch, sequence=SEQUENCE, precision="fp32")
    plain = SyntheticTokens(batch, SEQUENCE, 1024, 0)
    per_micro_batch_s = statistics.median(_turns([_step(job, plain)], 5)[0]) / MICRO_BATCHES
    kinds: dict[str, DataSource] = {
        "cheap": plain,
        "waits": Costly(plain, lambda: time.sleep(per_micro_batch_s)),
        "computes": Costly(plain, lambda: _compute(per_micro_batch_s)),
    }
    rows = []
    for name, source in kinds.items():
        inline, ahead = _turns([_step(job, source, inline=True), _step(job, source)], asked.rounds)
        one, other = statistics.median(inline), statistics.median(ahead)
        rows.append([name, f"{one * 1e3:.1f}", f"{other * 1e3:.1f}", f"{other / one:.3f}"])
    print(table(("data", "inline ms", "ahead ms", "ratio"), rows))
    return 0


def _compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def _step(job: Job, source: DataSource, *, inline: bool = False) -> Callable[[], object]:
    place = Place("cpu", "local", "local")
    stage = Stage((0, len(job.model.layers)), 1, (place,))
    plan = Plan(SIZE, (Pipeline(MICRO_BATCHES, (stage,)),))
    trainer = RankTrainer(job, plan, 0, SingleRankTransport(), source)
    if inline:
        pipeline: Any = trainer._pipeline
        pipeline._data = source
    return trainer.step


def _turns(steps: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    seconds: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + FIRST_ROUNDS):
        for step, found in zip(steps, seconds, strict=True):
            begin_s = time.perf_counter()
            step()
            if number >= FIRST_ROUNDS:
                found.append(time.perf_counter() - begin_s)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
