"""The DeepSpeed engine: trains plans whose pipelines are all alike.

Layers, initial weights, samples, loss and saved state are those of the sailor engine. DeepSpeed
does everything in between, and the user's DeepSpeed configuration is honoured.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.data.batch import NO_LABEL, DataSource, next_hash
from worker.engines.deepspeed.build_ops import load_ops, ops_needed
from worker.engines.deepspeed.config import DeepSpeedConfigError, optimizer_of
from worker.engines.deepspeed.state import load_engine, pieces_of_engine
from worker.layout.rank_layout import RankPlace, rank_places, sample_positions
from worker.layout.tensor_table import table_of
from worker.models.apply_plan import ShardValues, build_layers
from worker.models.loss import loss_sum
from worker.models.random_numbers.microbatch_context import MicroBatch, MicroBatchContext
from worker.training.full_tensors import RankTensors, TensorKey
from worker.training.optimizer import learning_rate
from worker.training.precision import LossScale, formats_of
from worker.training.snapshot_hook import NoSnapshots, SnapshotHook
from worker.training.step_report import StepReport
from worker.training.trainer import NotANumberError, TrainingProgress
from worker.training.utilization import seconds_at_peak


class DeepSpeedTrainer:
    """One rank of a plan, trained by DeepSpeed; has the interface of ``RankTrainer``."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        rank: int,
        store: Store,
        data: DataSource,
        config: Mapping[str, Any],
        *,
        device: torch.device,
        deadline_s: float,
        weights: Callable[[int], ShardValues] | None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """``check`` raises the failure that ended the generation, if there is one."""
        self._check = check
        self.job, self.plan, self.data, self.device = job, plan, data, device
        self.place: RankPlace = rank_places(plan)[rank]
        self._follows_job = config["optimizer"] == optimizer_of(job) and "scheduler" not in config
        self.progress = TrainingProgress.first(LossScale.first(formats_of(job), job), data)
        self._at_peak_s = seconds_at_peak(job, plan, device)
        self.snapshot_hook: SnapshotHook = NoSnapshots()
        self._number = 0
        self._context = MicroBatchContext()
        self._per_label = 0.0
        count = len(rank_places(plan))
        local = rank if device.index is None else device.index
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(count)}
        backend = "nccl" if device.type == "cuda" else "gloo"
        # DeepSpeed needs torch's global group; its own messages are suppressed.
        with _without_messages():
            wait = timedelta(seconds=deadline_s)
            dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=wait)
            self._layers = build_layers(
                job,
                self.place.layers,
                context=self._context,
                dtype=torch.float32,
                device=device,
                weights=weights,
            )
            self._engine = _engine(self._model, config)
            _keep_norm(self._engine)
        self._dtype = next(t.parameter.dtype for layer in self._layers for t in layer.tensors)
        self._layers[0].module.register_forward_pre_hook(self._advance_micro_batch)
        # Which layers had a non-finite output, recorded without waiting for the device.
        self._bad = torch.zeros(len(job.model.layers), dtype=torch.bool, device=device)
        for layer in self._layers:
            layer.module.register_forward_hook(partial(self._check_output, layer.index))

    def step(self) -> StepReport:
        """Train on the next batch."""
        begin_s = time.perf_counter()
        before = self.progress
        if self._follows_job:
            for group in self._engine.optimizer.param_groups:
                group["lr"] = learning_rate(self.job, before.step)
        batches, digest_sum, labels, stops = self._read()
        count = len(batches) * len(self.plan.pipelines)
        # DeepSpeed averages over micro batches; the loss must be averaged over labels.
        self._per_label = count / max(labels, 1)
        self._number = 0
        self._bad.zero_()
        loss = float(self._engine.train_batch(iter(batches)))
        self._check()  # On a GPU, an aborted sum ends like a completed one.
        norm = self._engine.get_global_grad_norm()
        skipped = bool(getattr(self._engine.optimizer, "overflow", False))
        if not math.isfinite(loss) and self.job.precision != "fp16":
            self._raise_if_not_finite()
        self.progress = replace(
            before,
            step=before.step + 1,
            updates=before.updates + int(not skipped),
            sample_hash=next_hash(before.sample_hash, step=before.step, digest_sum=digest_sum),
            samples=before.samples + self.job.global_batch,
            label_tokens=before.label_tokens + labels,
        )
        return StepReport(
            step=before.step,
            loss=loss,
            grad_norm=float("nan") if norm is None else float(norm),
            samples=self.job.global_batch,
            seconds=time.perf_counter() - begin_s,
            sample_hash=self.progress.sample_hash,
            label_tokens=labels,
            learning_rate=float(self._engine.get_lr()[0]),
            skipped=skipped,
            skipped_steps=self.progress.step - self.progress.updates,
            stop=stops > 0,
            at_peak_s=self._at_peak_s,
        )

    def log(self, report: StepReport) -> None:
        """Do nothing: scripts are trained by the sailor engine."""

    def evaluate_if_due(self) -> None:
        """Do nothing: scripts are trained by the sailor engine."""

    def close(self) -> None:
        """Leave the process groups, so that this process can join others."""
        leave_groups()

    def rank_tensors(self) -> RankTensors:
        """Return this rank's state under the sailor engine's names; a collective."""
        return pieces_of_engine(self._engine, self.job, self._layers)

    def restore(self, logical: Mapping[TensorKey, Tensor], progress: TrainingProgress) -> None:
        """Continue from full tensors, which any engine may have produced.

        In fp16 the loss scale starts anew.
        """
        load_engine(self._engine, self.job, self._layers, logical, updates=progress.updates)
        self.progress = progress.on(self.progress)

    def _model(self) -> nn.Module:
        pipe: Any = importlib.import_module("deepspeed.pipe")
        topology: Any = importlib.import_module("deepspeed.runtime.pipe.topology")
        stages, count = self.plan.pipelines[0].stages, len(self.job.model.layers)
        local = {layer.index: layer.module for layer in self._layers}
        tied = _find_tied_across_stages(self.job, [stage.layers for stage in stages])

        class _PrebuiltLayer(pipe.LayerSpec):  # type: ignore[misc]  # DeepSpeed is not typed
            """A layer that this rank has already built."""

            def __init__(self, index: int) -> None:
                super().__init__(nn.Module)
                self.index = index

            def build(self, log: bool = False) -> nn.Module:  # noqa: ARG002 - as there
                return local[self.index]

        class _PrebuiltTiedLayer(pipe.TiedLayerSpec):  # type: ignore[misc]  # DeepSpeed is not typed
            """One of two layers that share a weight and are in different stages."""

            def __init__(self, index: int, name: str) -> None:
                super().__init__("tied", nn.Module, tied_weight_attr=name)
                self.index = index

            def build(self, log: bool = False) -> nn.Module:  # noqa: ARG002 - as there
                return local[self.index]

        class _PlannedPipelines(pipe.PipelineModule):  # type: ignore[misc]  # DeepSpeed is not typed
            """Split into the plan's stages."""

            def _partition_layers(self, method: str = "") -> None:  # noqa: ARG002 - as there
                self.parts = [*(stage.layers[0] for stage in stages), count]
                number = self._topo.get_coord(self.global_rank).pipe
                self._set_bounds(start=self.parts[number], stop=self.parts[number + 1])

        model: nn.Module = _PlannedPipelines(
            [
                _PrebuiltTiedLayer(i, tied[i]) if i in tied else _PrebuiltLayer(i)
                for i in range(count)
            ],
            # Our ranks are numbered by pipeline first, then by stage.
            topology=topology.ProcessTopology(
                ["data", "pipe"], [len(self.plan.pipelines), len(stages)]
            ),
            loss_fn=self._loss,
            activation_checkpoint_interval=0,
        )
        for index, name in tied.items():
            for own, parameter in local[index].named_parameters() if index in local else ():
                if own != name:
                    # Only the shared weight is held twice; the other parameters count in the norm.
                    parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]  # theirs alone
        for parameter in model.parameters():
            # Without this mark only the first stage's gradients would count in the norm.
            replicated = getattr(parameter, "ds_pipe_replicated", False)
            parameter.model_parallel = not replicated  # type: ignore[attr-defined]  # theirs alone
        return model

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = loss_sum(logits, labels, vocabulary=self.job.model.vocab) * self._per_label
        self._bad[-1] |= ~torch.isfinite(loss.detach())
        return loss

    def first_digest(self, step: int) -> int | None:
        """Load a step's first sample, which no other rank may see differently; ``None``: none."""
        reads = self.place.is_first or self.place.is_last
        return int(self.data.batch(step, range(1)).digests[0]) if reads else None

    def _read(self) -> tuple[list[tuple[Tensor, Tensor]], int, int, int]:
        """Return the micro batches, and over all ranks: digest sum, labels, stop requests."""
        place = self.place
        batches: list[tuple[Tensor, Tensor]] = []
        counts = torch.zeros(3, dtype=torch.int64, device=self.device)
        counts[2] = int(self.snapshot_hook.wants_to_stop(self.progress.step))
        for number in range(self.plan.pipelines[place.pipeline].micro_batches):
            if not (place.is_first or place.is_last):
                batches.append((torch.empty(0), torch.empty(0)))  # Middle stages do not read them.
                continue
            positions = sample_positions(self.plan, pipeline=place.pipeline, micro_batch=number)
            samples = self.data.batch(self.progress.step, positions)
            if place.is_first:
                counts[0] += int(samples.digests.sum())
            if place.is_last:
                counts[1] += int((samples.labels != NO_LABEL).sum())
            inputs = samples.inputs
            inputs = inputs.to(self._dtype) if inputs.is_floating_point() else inputs
            batches.append((inputs, samples.labels))
        dist.all_reduce(counts)
        digest_sum, labels, stops = counts.tolist()
        return batches, digest_sum, labels, stops

    def _advance_micro_batch(self, *_: Any) -> None:
        """Set the next micro batch for dropout; forward passes run in this order."""
        positions = sample_positions(
            self.plan, pipeline=self.place.pipeline, micro_batch=self._number
        )
        self._number += 1
        samples = torch.arange(positions.start, positions.stop, device=self.device)
        self._context.current = MicroBatch(self.job.data.seed, self.progress.step, samples)

    def _check_output(self, layer: int, _: nn.Module, __: Any, output: Tensor) -> None:
        self._bad[layer] |= ~torch.isfinite(output.detach()).all()

    def _raise_if_not_finite(self) -> NoReturn:
        """Raise ``NotANumberError`` on all ranks with the first non-finite layer and its rank."""
        ranks, layers = dist.get_world_size(), len(self._bad)
        first = int(self._bad.nonzero()[0]) if self._bad.any() else layers
        found = torch.tensor(first * ranks + self.place.rank, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        layer, rank = divmod(int(found), ranks)
        if layer >= layers:
            self._check()
        assert layer < layers, "the loss comes from the last layer"
        raise NotANumberError(self.progress.step, layer=layer, rank=rank)


def leave_groups() -> None:
    """Destroy the global groups of torch and DeepSpeed, so that new ones can be made."""
    if dist.is_initialized():
        dist.destroy_process_group()
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    comm.cdb = None


def _find_tied_across_stages(job: Job, stages: list[tuple[int, int]]) -> dict[int, str]:
    """Return the tied layers, with the name of their weight, if no stage holds both."""
    for index in range(len(job.model.layers)):
        for tensor in table_of(job, index):
            if tensor.tied_name is not None and stages[0][1] <= index:
                return {0: tensor.tied_name, index: tensor.name}
    return {}


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """Suppress DeepSpeed's messages; its warnings remain."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # It broadcasts tensors that require gradients, about which torch warns.
    warnings.filterwarnings("ignore", "c10d::broadcast_")
    # It calls functions that torch has renamed.
    warnings.filterwarnings("ignore", "`torch.distributed.\\w+` is deprecated", FutureWarning)
    with open(os.devnull, "w", encoding="ascii") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _engine(make: Callable[[], nn.Module], config: Mapping[str, Any]) -> Any:
    deepspeed: Any = importlib.import_module("deepspeed")
    # An extension for inference, which would be compiled at start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False)
    load_ops(ops_needed(config))
    model = make()
    try:
        engine, *_ = deepspeed.initialize(model=model, config=dict(config))
    except (AssertionError, TypeError, ValueError) as error:
        # DeepSpeed reports configuration errors this way, with long explanations.
        text = " ".join(str(error).partition("For further information")[0].split())
        raise DeepSpeedConfigError(f"DeepSpeed rejects its configuration: {text}") from None
    return engine


def _keep_norm(engine: Any) -> None:
    """Keep the gradient norm in fp32 too; DeepSpeed computes it for clipping and drops it."""
    utils: Any = importlib.import_module("deepspeed.runtime.utils")

    def clip() -> None:
        engine._global_grad_norm = utils.clip_grad_norm_(
            parameters=engine.module.parameters(),
            max_norm=engine.gradient_clipping(),
            mpu=engine.mpu,
        )

    engine.clip_fp32_gradients = clip
