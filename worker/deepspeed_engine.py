"""The other engine: DeepSpeed's pipelines, for plans whose pipelines are all alike.

The layers, their first weights, the samples, the loss and what is saved are those of our own
engine; what happens between them is DeepSpeed's, and a user's configuration of it is honoured.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from simulator.errors import InputError, Problem
from simulator.files import load_document
from simulator.job import Job
from simulator.plan import Plan
from worker.context import MicroBatch, Moment
from worker.data.samples import FIRST_HASH, Data, next_hash
from worker.layout import TIED, Seat, own_tensors, sample_positions, seats_of
from worker.loss import NO_LABEL, loss_sum
from worker.optimizer import BETA_1, BETA_2, EPSILON, MOMENTUM, WEIGHT_DECAY, learning_rate
from worker.parallelize import LocalLayer, Values, build_layer, tie
from worker.state import Pieces
from worker.table import table_of
from worker.trainer import StepReport

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def problems_with(plan: Plan, job: Job, *, place: str) -> list[Problem]:
    """Say what of a plan or a job DeepSpeed's engine cannot do."""
    found = []
    first = plan.pipelines[0]
    shape = (first.micro_batches, [stage.layers for stage in first.stages])
    for pipeline in plan.pipelines[1:]:
        if (pipeline.micro_batches, [stage.layers for stage in pipeline.stages]) != shape:
            found.append(Problem(place, "its pipelines differ", "the sailor engine trains it"))
            break
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    if any(stage.tp > 1 for stage in stages):
        found.append(Problem(place, "has TP degrees above 1", "the sailor engine trains it"))
    if any(stage.recompute != "none" for stage in stages):
        found.append(Problem(place, "recomputes activations", "the sailor engine does so"))
    if plan.schedule != "1f1b":
        found.append(Problem(place, f"has the schedule {plan.schedule}", "DeepSpeed's is 1f1b"))
    if job.model.family == "exact":
        found.append(Problem("[model] family", "is exact, which DeepSpeed's sums are not"))
    return found


def read_config(path: Path | None, plan: Plan, job: Job) -> dict[str, Any]:
    """The configuration of DeepSpeed: the user's, and from the job what the user does not say."""
    given = {} if path is None else load_document(path).data
    ours = dict(
        zip(
            _BATCH_KEYS,
            (job.global_batch, plan.micro_batch_size, plan.pipelines[0].micro_batches),
            strict=True,
        )
    )
    found = [
        Problem(str(path), f"{key} is {given[key]!r}, but the plan says {value}", "leave it out")
        for key, value in ours.items()
        if given.get(key, "auto") not in ("auto", value)
    ]
    if found:
        raise InputError(found)
    defaults: dict[str, Any] = {
        "steps_per_print": 10**9,
        "optimizer": _optimizer(job),
        "zero_optimization": {"stage": job.zero},
        "gradient_clipping": job.clip_norm or 0.0,
    }
    if job.precision != "fp32":
        defaults[job.precision] = {"enabled": True}
    return {**defaults, **given, **ours}


def _optimizer(job: Job) -> dict[str, Any]:
    rate = {"lr": job.learning_rate}
    if job.optimizer == "sgd":
        return {"type": "SGD", "params": {**rate, "momentum": MOMENTUM}}
    adam = {**rate, "betas": [BETA_1, BETA_2], "eps": EPSILON, "torch_adam": True}
    decay = WEIGHT_DECAY if job.optimizer == "adamw" else 0.0
    params = {**adam, "weight_decay": decay, "adam_w_mode": job.optimizer == "adamw"}
    return {"type": "AdamW" if job.optimizer == "adamw" else "Adam", "params": params}


class DeepSpeedTrainer:
    """One rank of a plan, trained by DeepSpeed; it is stepped like our own trainer."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        rank: int,
        store: Store,
        data: Data,
        config: Mapping[str, Any],
        *,
        device: torch.device,
        deadline_s: float,
        weights: Callable[[int], Values] | None,
    ) -> None:
        self.job, self.plan, self.data, self.device = job, plan, data, device
        self.seat: Seat = seats_of(plan)[rank]
        self._follows_job = config["optimizer"] == _optimizer(job) and "scheduler" not in config
        self._step, self._number, self._hash = 0, 0, FIRST_HASH
        self._moment = Moment()
        self._digests = torch.zeros(2, dtype=torch.int64, device=device)
        count = len(seats_of(plan))
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        backend = "nccl" if device.type == "cuda" else "gloo"
        # DeepSpeed knows only torch's global group; it says much that nobody asked for.
        with _quiet():
            wait = timedelta(seconds=deadline_s)
            dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=wait)
            self._layers = self._build(weights)
            self._engine = _engine(self._model, config)
        self._dtype = next(t.parameter.dtype for layer in self._layers for t in layer.tensors)
        self._layers[0].module.register_forward_pre_hook(self._next_moment)

    def step(self) -> StepReport:
        """Train on the next batch."""
        begin_s = time.perf_counter()
        if self._follows_job:
            for group in self._engine.optimizer.param_groups:
                group["lr"] = learning_rate(self.job, self._step)
        self._digests.zero_()
        self._number = 0
        loss = float(self._engine.train_batch(self._batches()))
        norm = self._engine.get_global_grad_norm()
        dist.all_reduce(self._digests)
        digest_sum, labels = self._digests.tolist()
        self._hash = next_hash(self._hash, step=self._step, digest_sum=digest_sum)
        self._step += 1
        return StepReport(
            step=self._step - 1,
            loss=loss,
            grad_norm=float("nan") if norm is None else float(norm),
            samples=self.job.global_batch,
            seconds=time.perf_counter() - begin_s,
            sample_hash=self._hash,
            label_tokens=labels,
            skipped=bool(getattr(self._engine.optimizer, "overflow", False)),
            stop=False,
        )

    def close(self) -> None:
        """Leave the other ranks in peace."""
        dist.destroy_process_group()

    def pieces(self) -> Pieces:
        """What this rank holds of the weights, named as our own engine names it."""
        tables = own_tensors(table_of(self.job, i) for i in range(len(self.job.model.layers)))
        shared = {spec.name for spec in tables[TIED]}
        found: Pieces = {}
        for layer in self._layers:
            for tensor in layer.tensors:
                name = tensor.spec.tied_name or tensor.spec.name
                is_shared = tensor.spec.tied_name is not None or layer.index == 0
                place = TIED if is_shared and name in shared else layer.index
                atoms = None if tensor.spec.split_dim is None else range(self.job.max_tp)
                values = tensor.parameter.detach().float().cpu().clone()
                found[place, name, "master"] = [(atoms, values)]
        return found

    def _build(self, weights: Callable[[int], Values] | None) -> list[LocalLayer]:
        layers = [
            build_layer(
                self.job,
                index,
                tp=1,
                tp_index=0,
                group=None,
                moment=self._moment,
                dtype=torch.float32,
                device=self.device,
                values=None if weights is None else weights(index),
            )
            for index in range(*self.seat.layers)
        ]
        tie(layers)
        return layers

    def _model(self) -> nn.Module:
        pipe: Any = importlib.import_module("deepspeed.pipe")
        topology: Any = importlib.import_module("deepspeed.runtime.pipe.topology")
        stages, count = self.plan.pipelines[0].stages, len(self.job.model.layers)
        local = {layer.index: layer.module for layer in self._layers}
        tied = _tied_apart(self.job, [stage.layers for stage in stages])

        class Made(pipe.LayerSpec):  # type: ignore[misc]  # DeepSpeed is not typed
            """A layer that is there already, where this rank holds it."""

            def __init__(self, index: int) -> None:
                super().__init__(nn.Module)
                self.index = index

            def build(self, log: bool = False) -> nn.Module:  # noqa: ARG002 - as there
                return local[self.index]

        class MadeTied(pipe.TiedLayerSpec):  # type: ignore[misc]  # DeepSpeed is not typed
            """One of two that share a weight, and stand in different stages."""

            def __init__(self, index: int, name: str) -> None:
                super().__init__("tied", nn.Module, tied_weight_attr=name)
                self.index = index

            def build(self, log: bool = False) -> nn.Module:  # noqa: ARG002 - as there
                return local[self.index]

        class Pipelines(pipe.PipelineModule):  # type: ignore[misc]  # DeepSpeed is not typed
            """Cut where the plan says."""

            def _partition_layers(self, method: str = "") -> None:  # noqa: ARG002 - as there
                self.parts = [*(stage.layers[0] for stage in stages), count]
                number = self._topo.get_coord(self.global_rank).pipe
                self._set_bounds(start=self.parts[number], stop=self.parts[number + 1])

        model: nn.Module = Pipelines(
            [MadeTied(i, tied[i]) if i in tied else Made(i) for i in range(count)],
            # Our ranks count the stages of one pipeline before those of the next.
            topology=topology.ProcessTopology(
                ["data", "pipe"], [len(self.plan.pipelines), len(stages)]
            ),
            loss_fn=self._loss,
            activation_checkpoint_interval=0,
        )
        for index, name in tied.items():
            for own, parameter in local[index].named_parameters() if index in local else ():
                if own != name:
                    # Only the shared weight is held twice; the rest counts in the norm.
                    parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]  # theirs alone
        return model

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return loss_sum(logits, labels, vocabulary=self.job.model.vocab) / labels.numel()

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        seat = self.seat
        for number in range(self.plan.pipelines[seat.pipeline].micro_batches):
            positions = sample_positions(self.plan, pipeline=seat.pipeline, micro_batch=number)
            samples = self.data.batch(self._step, positions)
            if seat.is_first:
                self._digests[0] += int(samples.digests.sum())
            if seat.is_last:
                self._digests[1] += int((samples.labels != NO_LABEL).sum())
            inputs = samples.inputs
            yield inputs.to(self._dtype) if inputs.is_floating_point() else inputs, samples.labels

    def _next_moment(self, *_: Any) -> None:
        """Passes begin in the order of their micro batches, which dropout must know."""
        positions = sample_positions(
            self.plan, pipeline=self.seat.pipeline, micro_batch=self._number
        )
        self._number += 1
        samples = torch.arange(positions.start, positions.stop, device=self.device)
        self._moment.now = MicroBatch(self.job.data.seed, self._step, samples)


def _tied_apart(job: Job, stages: list[tuple[int, int]]) -> dict[int, str]:
    """The layers that share a weight though no stage has both, and what they call it."""
    for index in range(len(job.model.layers)):
        for tensor in table_of(job, index):
            if tensor.tied_name is not None and stages[0][1] <= index:
                return {0: tensor.tied_name, index: tensor.name}
    return {}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what DeepSpeed tells of itself; its warnings stay."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # It sends what autograd knows of, and torch tells so at each start.
    warnings.filterwarnings("ignore", "c10d::broadcast_")
    with open(os.devnull, "w", encoding="ascii") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _engine(make: Callable[[], nn.Module], config: Mapping[str, Any]) -> Any:
    deepspeed: Any = importlib.import_module("deepspeed")
    # An extension that serves inference, and would be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False)
    engine, *_ = deepspeed.initialize(model=make(), config=dict(config))
    return engine
