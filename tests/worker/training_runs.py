"""Jobs small enough for hundreds of plans, their training runs, and a plain loop to compare."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch.nn import functional

from simulator.models.families import build_model
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from tests.worker.checksums import checksums
from tests.worker.threads import ThreadTransport, run_as_threads
from worker.data.batch import NO_LABEL, Samples
from worker.data.sources.synthetic import SyntheticImages
from worker.layout.tensor_table import tensors_of
from worker.models.apply_plan import LocalLayer, build_layers
from worker.models.random_numbers.microbatch_context import MicroBatch, MicroBatchContext
from worker.training.full_tensors import TensorKey, merge_ranks, rank_tensors
from worker.training.precision import NumberFormats
from worker.training.step_report import StepReport
from worker.training.trainer import RankTrainer

HERE = Place("cpu", "local", "local")


def small_job(family: str = "gpt2", **changes: Any) -> Job:
    """Return a job with 4 or 5 layers, 8 samples and 4 atoms; ``changes`` sets fields."""
    numbers: dict[str, Any] = {"layers": 3, "hidden": 16, "heads": 4, "vocab": 30}
    if family == "llama":
        numbers |= {"kv_heads": 2, "ffn": 32}
    tied = changes.pop("tied", None)
    if tied is not None:
        numbers["tied"] = tied
    job = Job(
        "small",
        build_model(family, **numbers),
        global_batch=8,
        sequence=6,
        precision="fp32",
        max_tp=4,
        learning_rate=1e-3,
    )
    return replace(job, **changes)


def plan_of(size: int, *pipelines: tuple[int, Sequence[tuple[int, int, int]]]) -> Plan:
    """Build a plan from (micro batches, [(first layer, end, TP degree), ...])."""
    return Plan(
        size,
        tuple(
            Pipeline(count, tuple(Stage((first, end), tp, (HERE,)) for first, end, tp in stages))
            for count, stages in pipelines
        ),
    )


def alone(job: Job) -> Plan:
    """Return a plan with the whole job on one rank."""
    return plan_of(job.global_batch, (1, [(0, len(job.model.layers), 1)]))


class SomeLabels:
    """Random tokens, of which a varying number has no label."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def batch(self, step: int, positions: Sequence[int]) -> Samples:
        """Return samples that depend on their position alone."""
        job, rows = self._job, []
        for position in positions:
            generator = torch.Generator().manual_seed(1000 * step + position)
            row = torch.randint(job.model.vocab, (job.sequence + 1,), generator=generator)
            labels = row[1:].clone()
            labels[: position % job.sequence] = NO_LABEL
            rows.append((row[:-1], labels))
        inputs, labels_of = (torch.stack(each) for each in zip(*rows, strict=True))
        return Samples(inputs, labels_of, inputs.sum(1) * 8 + torch.tensor(list(positions)))


def image_job(**changes: Any) -> Job:
    """Return a job that trains a small ViT."""
    model = build_model(
        "vit", layers=3, hidden=16, heads=4, classes=10, image=8, patch=4, channels=3
    )
    return small_job(model=model, sequence=model.sequence_max, **changes)


class BadImages:
    """Images; in some steps a pixel of sample 5 is not a number."""

    def __init__(self, bad_steps: Collection[int]) -> None:
        self._data, self._bad_steps = SyntheticImages(8, 8, 3, 10, 0), bad_steps

    def batch(self, step: int, positions: Sequence[int]) -> Samples:
        """Return the samples at these positions."""
        found = self._data.batch(step, positions)
        if step in self._bad_steps and 5 in positions:
            found.inputs[list(positions).index(5), 0, 0, 0] = math.nan
        return found


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run, merged over all ranks."""

    reports: list[StepReport]
    state: dict[TensorKey, torch.Tensor]
    disagreements: list[str]
    """Holders with different bits, and after which step."""
    trainers: list[RankTrainer]


def trained(
    job: Job,
    plan: Plan,
    *,
    steps: int = 1,
    precision: NumberFormats | None = None,
    compare: bool = True,
    data: Any = None,
) -> Run:
    """Train under a plan with all ranks as threads."""
    data = data or SomeLabels(job)

    def body(transport: ThreadTransport) -> tuple[Any, ...]:
        trainer = RankTrainer(job, plan, transport.rank, transport, data, precision=precision)
        reports, sums = [], []
        for _ in range(steps):
            reports.append(trainer.step())
            buffers = trainer.buffers.values() if compare else ()
            sums.append({k: v for memory in buffers for k, v in checksums(memory).items()})
        return trainer, reports, sums, rank_tensors(trainer.buffers.values())

    ranks = run_as_threads(plan.device_count, body)
    disagreements = []
    for step in range(steps):
        known: dict[Any, str] = {}
        for rank, (_, _, sums, _) in enumerate(ranks):
            for key, digest in sums[step].items():
                if known.setdefault(key, digest) != digest:
                    disagreements.append(f"step {step}: rank {rank} has another {key}")
    for _, reports, _, _ in ranks:
        # As text, in which NaN equals NaN.
        assert [str(replace(r, seconds=0, data_wait_s=0)) for r in reports] == [
            str(replace(r, seconds=0, data_wait_s=0)) for r in ranks[0][1]
        ]
    state = merge_ranks([pieces for _, _, _, pieces in ranks], tensors_of(job))
    return Run(ranks[0][1], state, disagreements, [rank[0] for rank in ranks])


# -- the oracle: plain autograd over the whole batch ----------------------------------------------


class PlainLoop:
    """A plain training loop: full layers, one batch, torch's autograd and optimizer."""

    def __init__(self, job: Job, *, dtype: torch.dtype, data: Any = None) -> None:
        self.job, self.data = job, data or SomeLabels(job)
        self._context = MicroBatchContext()
        everything = range(len(job.model.layers))
        self.layers: list[LocalLayer] = build_layers(
            job, everything, context=self._context, dtype=dtype
        )
        self.parameters = list(
            {p: None for layer in self.layers for p in layer.module.parameters()}
        )

    def backward(self, step: int) -> float:
        """Differentiate the mean loss of the batch and return it."""
        everything = range(self.job.global_batch)
        samples = self.data.batch(step, everything)
        self._context.current = MicroBatch(self.job.data.seed, step, torch.tensor(list(everything)))
        for parameter in self.parameters:
            parameter.grad = None
        x = samples.inputs
        for layer in self.layers:
            x = layer.module(x)
        logits = x.flatten(0, -2)[:, : self.job.model.vocab]
        loss = functional.cross_entropy(logits, samples.labels.flatten(), ignore_index=NO_LABEL)
        loss.backward()
        return loss.item()

    def gradients(self) -> dict[tuple[int, str], torch.Tensor]:
        """Return the gradient of each tensor by layer and name; tied tensors once."""
        return {
            (layer.index, tensor.spec.name): tensor.parameter.grad
            for layer in self.layers
            for tensor in layer.tensors
            if tensor.spec.tied_name is None and tensor.parameter.grad is not None
        }


def mean_gradients(run: Run, job: Job) -> dict[tuple[int, str], torch.Tensor]:
    """Return a run's last gradients as means over the labels, tied ones in layer 0."""
    scale = job.global_batch * job.sequence / run.reports[-1].label_tokens
    return {
        (max(layer, 0), name): values * scale
        for (layer, name, kind), values in run.state.items()
        if kind == "gradient"
    }


def drawn(seed: int) -> Random:
    """Return a seeded random generator."""
    return Random(f"plans {seed}")
