"""How long a training step takes: this runtime, DeepSpeed's pipeline engine, torch's pipelining.

    python -m benchmarks.runtime [--hidden N] [--layers N] [--sequence N] [--rounds N]

All train the same layers under the same homogeneous plan (two stages, two pipelines, no tensor
parallelism) in the same four processes of this machine, a step of each in turn and in another order
each time, so that other load on the machine affects all alike. Processor time is the sum over all
ranks and excludes that load. A second table compares one rank with a plain loop, and says what
adding the bits of its state takes, with which replicas are compared every 20 steps.
Without deepspeed its column is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from sailord.text.table import table
from simulator.models.families import build_model
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from worker.checkpoint.load_state import bit_sums
from worker.checkpoint.placement import state_shape
from worker.data.sources.synthetic import SyntheticTokens
from worker.distributed.process_groups import ProcessTransport
from worker.distributed.single_rank import SingleRankTransport
from worker.models.apply_plan import build_layer
from worker.models.loss import loss_sum
from worker.models.random_numbers.microbatch_context import MicroBatchContext
from worker.training.trainer import RankTrainer

STAGES, PIPELINES, MICRO_BATCHES = 2, 2, 4
RANKS = STAGES * PIPELINES
Step = Callable[[int], object]
Times = dict[str, list[float]]
FIRST_ROUNDS = 2
"""Warm-up steps, not counted: memory is reserved and libraries are loaded."""


@dataclass(frozen=True, slots=True)
class Size:
    """What is trained."""

    hidden: int
    layers: int
    sequence: int
    micro_batch: int
    rounds: int

    def job(self, *, batch: int) -> Job:
        model = build_model(
            "gpt2", layers=self.layers, hidden=self.hidden, heads=8, vocab=1024, tied=False
        )
        return Job(
            "benchmark",
            model,
            global_batch=batch,
            sequence=self.sequence,
            precision="fp32",
            clip_norm=1.0,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time training steps of several runtimes.")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    size = Size(asked.hidden, asked.layers, asked.sequence, asked.micro_batch, asked.rounds)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run_rank, args=(rank, size, Path(folder), answers))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        times, busy = answers.get()
        for process in processes:
            process.join()
    tokens = size.micro_batch * MICRO_BATCHES * PIPELINES * size.sequence
    print(f"{STAGES} stages x {PIPELINES} pipelines, {tokens} tokens a step, {size}")
    _show(times, busy)
    print("\none rank")
    _show(*_run_alone(size))
    return 0


def _show(times: Times, busy: Times) -> None:
    own = times["sailor"]
    rows = []
    for name, seconds in times.items():
        median, best = statistics.median(seconds), min(seconds)
        ratio = statistics.median(own) / median
        processor = statistics.median(busy[name])
        row = (f"{median * 1e3:.1f}", f"{best * 1e3:.1f}", f"{ratio:.3f}", f"{processor * 1e3:.1f}")
        rows.append([name, *row])
    print(table(("runtime", "median ms", "best ms", "ratio of medians", "processor ms"), rows))


def _run_rank(rank: int, size: Size, folder: Path, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    store = FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    steps: dict[str, Step] = {"sailor": _sailor(rank, size, FileStore(str(folder / "own"), RANKS))}
    if importlib.util.find_spec("deepspeed") is not None:
        steps["deepspeed"] = _deepspeed(rank, size)
    steps["torch pipelining"] = _pipelining(rank, size)
    times, busy = _in_turn(steps, size.rounds, meet=dist.barrier)
    for name in steps:
        together = torch.tensor(busy[name], dtype=torch.float64)
        dist.all_reduce(together)
        busy[name] = together.tolist()
    if rank == 0:
        answers.put((times, busy))
    dist.barrier()


def _in_turn(
    steps: dict[str, Step], rounds: int, *, meet: Callable[[], object]
) -> tuple[Times, Times]:
    """Seconds on the clock and of this process's processor time, for each step of each runtime."""
    times: Times = {name: [] for name in steps}
    busy: Times = {name: [] for name in steps}
    names = deque(steps)
    for number in range(rounds + FIRST_ROUNDS):
        for name in names:
            meet()
            begin_s, begin_busy_s = time.perf_counter(), time.process_time()
            steps[name](number)
            busy_s = time.process_time() - begin_busy_s
            meet()
            if number >= FIRST_ROUNDS:
                times[name].append(time.perf_counter() - begin_s)
                busy[name].append(busy_s)
        names.rotate()
    return times, busy


# -- the runtimes ---------------------------------------------------------------------------------


def _sailor(rank: int, size: Size, store: Store) -> Step:
    job = size.job(batch=size.micro_batch * MICRO_BATCHES * PIPELINES)
    count = len(job.model.layers)
    place = Place("cpu", "local", "local")
    half = count // STAGES
    stages = (Stage((0, half), 1, (place,)), Stage((half, count), 1, (place,)))
    plan = Plan(size.micro_batch, (Pipeline(MICRO_BATCHES, stages),) * PIPELINES)
    transport = ProcessTransport(store, rank, RANKS)
    trainer = RankTrainer(job, plan, rank, transport, _data(job))
    return lambda _: trainer.step()


def _deepspeed(rank: int, size: Size) -> Step:
    with _hide_output():
        # Not typed, takes seconds, and not everybody has it.
        deepspeed: Any = importlib.import_module("deepspeed")
        pipe: Any = importlib.import_module("deepspeed.pipe")
        # An extension for inference that would have to be compiled.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        job = size.job(batch=size.micro_batch * MICRO_BATCHES * PIPELINES)
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        model = pipe.PipelineModule(
            _modules(job),
            num_stages=STAGES,
            loss_fn=_mean_loss(job),
            partition_method="uniform",
            activation_checkpoint_interval=0,
        )
        engine, *_ = deepspeed.initialize(
            model=model,
            config={
                "train_batch_size": job.global_batch,
                "train_micro_batch_size_per_gpu": size.micro_batch,
                "gradient_clipping": job.clip_norm,
                "steps_per_print": 10**9,
                "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
            },
        )
    data, pipeline = _data(job), rank % PIPELINES

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(MICRO_BATCHES):
            first = (pipeline * MICRO_BATCHES + number) * size.micro_batch
            samples = data.batch(step, range(first, first + size.micro_batch))
            yield samples.inputs, samples.labels

    return lambda step: engine.train_batch(batches(step))


def _pipelining(rank: int, size: Size) -> Step:
    """Torch's own schedule, with hand-written summing and clipping of gradients."""
    job = size.job(batch=size.micro_batch * MICRO_BATCHES * PIPELINES)
    half = len(job.model.layers) // STAGES
    stage_number, pipeline = rank // PIPELINES, rank % PIPELINES
    lines = [dist.new_group([p, p + PIPELINES]) for p in range(PIPELINES)]
    replicas = [dist.new_group([s * PIPELINES, s * PIPELINES + 1]) for s in range(STAGES)]
    module = nn.Sequential(*_modules(job)[stage_number * half :][:half])
    stage = PipelineStage(module, stage_number, STAGES, torch.device("cpu"), group=lines[pipeline])
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=_mean_loss(job))
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4)
    data, rows = _data(job), MICRO_BATCHES * size.micro_batch

    def step(number: int) -> None:
        samples = data.batch(number, range(pipeline * rows, (pipeline + 1) * rows))
        if stage_number == 0:
            schedule.step(samples.inputs)
        else:
            schedule.step(target=samples.labels, losses=[])
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=replicas[stage_number])
        flat /= PIPELINES
        square = torch.dot(flat, flat)
        dist.all_reduce(square, group=lines[pipeline])
        flat *= min(1.0, 1.0 / square.sqrt().item())
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        optimizer.step()
        optimizer.zero_grad()

    return step


def _run_alone(size: Size) -> tuple[Times, Times]:
    """One rank, a plain loop over the same micro batches, and the sums of the state's bits."""
    job = size.job(batch=size.micro_batch * MICRO_BATCHES)
    count = len(job.model.layers)
    stage = Stage((0, count), 1, (Place("cpu", "local", "local"),))
    plan = Plan(size.micro_batch, (Pipeline(MICRO_BATCHES, (stage,)),))
    trainer = RankTrainer(job, plan, 0, SingleRankTransport(), _data(job))
    module, loss = nn.Sequential(*_modules(job)), _mean_loss(job)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4)
    data = _data(job)

    def plain(step: int) -> None:
        for number in range(MICRO_BATCHES):
            first = number * size.micro_batch
            samples = data.batch(step, range(first, first + size.micro_batch))
            torch.autograd.backward(loss(module(samples.inputs), samples.labels) / MICRO_BATCHES)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def add_bits(_: int) -> None:
        sums = bit_sums(trainer.buffers, state_shape(job), zero=0)[1]
        assert sums is not None
        sums.tolist()

    steps: dict[str, Step] = {
        "sailor": lambda _: trainer.step(),
        "plain loop": plain,
        "adding all bits": add_bits,
    }
    return _in_turn(steps, size.rounds, meet=lambda: None)


def _data(job: Job) -> SyntheticTokens:
    return SyntheticTokens(job.global_batch, job.sequence, job.model.vocab, 0)


def _modules(job: Job) -> list[nn.Module]:
    whole: dict[str, Any] = {"tp": 1, "tp_index": 0, "group": None, "context": MicroBatchContext()}
    return [
        build_layer(job, index, **whole, dtype=torch.float32, device="cpu").module
        for index in range(len(job.model.layers))
    ]


def _mean_loss(job: Job) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return loss_sum(logits, labels, vocabulary=job.model.vocab) / labels.numel()

    return loss


@contextlib.contextmanager
def _hide_output() -> Iterator[None]:
    """Hide what libraries print during their setup."""
    with open(os.devnull, "w", encoding="ascii") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


if __name__ == "__main__":
    sys.exit(main())
