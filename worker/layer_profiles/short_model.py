"""One rank's share of each distinct layer of a job, as a short model that can be computed.

Layers with the same tensors and counts are equal, so one block stands for all of its kind, and
what is measured takes the memory of a few layers. They are computed in the order of the model by
the runtime's own code, so that each finds the caches as it would in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simulator.models.layers import Model
from simulator.spec.job import Data, Job, ParameterGroup
from worker.data.sources.open_data import open_data
from worker.layer_profiles.null_collective import NullCollective
from worker.layout.rank_layout import TIED, atoms_held
from worker.layout.shards import shard_of
from worker.layout.tensor_table import tensors_of
from worker.models.apply_plan import HeldLayer, LocalLayer, LocalTensor, Metrics, build_layer, tie
from worker.models.random_numbers.microbatch_context import (
    MicroBatch,
    MicroBatchContext,
    batch_on_device,
)
from worker.models.user_module.module_layers import ModuleLayer, build_module_layers
from worker.script.recipe import Recipe
from worker.training.flat_buffers import LayerBuffer, layer_buffers
from worker.training.optimizer import FUSED, OptimizerStep
from worker.training.pipeline_stage import StageRunner
from worker.training.precision import LossScale, formats_of, loss_factor, on_device
from worker.training.step_vote import square_sum
from worker.types import LogicalTensor

MarkPart = Callable[[], None]


def distinct_layers(model: Model) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layers to compute, and for each layer of the model which of these stands for it.

    A computed layer needs an input as large as in the model; where the layer before it would hand
    on another size, the layers between are computed as well.
    """
    chain: list[int] = []
    known: dict[Any, int] = {}
    stands: list[int] = []
    for index, layer in enumerate(model.layers):
        key = replace(layer, name="")
        if key not in known:
            if chain:
                here, before = model.layers[chain[-1]], model.layers[index - 1]
                if here.output_per_token != before.output_per_token:
                    chain += range(chain[-1] + 1, index)
            known[key] = len(chain)
            chain.append(index)
        stands.append(known[key])
    return tuple(chain), tuple(stands)


@dataclass(slots=True)
class _Marked:
    """A layer that notes the end of its forward pass."""

    layer: HeldLayer
    mark: MarkPart
    index: int
    tensors: tuple[LocalTensor, ...]

    def __call__(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        self.mark()
        return out

    def losses(self, x: Tensor, current: MicroBatch) -> Tensor:
        out = self.layer.losses(x, current)
        self.mark()
        return out

    def metrics(self, x: Tensor, current: MicroBatch) -> Metrics:
        return self.layer.metrics(x, current)

    def set_training(self, on: bool) -> None:
        self.layer.set_training(on)


class ShortModel:
    """The distinct layers of a job on one device, as rank 0 of ``tp`` holds them."""

    def __init__(self, job: Job, recipe: Recipe | None, *, tp: int, device: torch.device) -> None:
        self.job, self.device = job, device
        self.indices, self.stands = distinct_layers(job.model)
        self._recipe = recipe
        self._precision = on_device(formats_of(job), device)
        self._context = MicroBatchContext()
        self.layers = self._build(tp)
        self.buffers: Mapping[int, LayerBuffer] = layer_buffers(
            self.layers,
            tensors_of(job),
            atoms=job.max_tp,
            held=atoms_held(tp=tp, index=0, atoms=job.max_tp),
            precision=self._precision,
            moments=0,
            owned=(),
            device=device,
        )
        self._seed = loss_factor(job, self._precision, LossScale.first(self._precision, job))

    def _build(self, tp: int) -> Sequence[LocalLayer | ModuleLayer]:
        group = NullCollective(tp) if tp > 1 else None
        share: dict[str, Any] = {"tp": tp, "tp_index": 0, "group": group}
        share |= {"context": self._context, "device": self.device}
        if self._recipe is not None:
            share |= {"master": self._precision.master, "compute": self._precision.compute}
            return build_module_layers(self._recipe, self.job, self.indices, **share)

        def values(spec: LogicalTensor, held: range) -> Tensor:
            # Times do not depend on the values, apart from numbers too small to be normal.
            shape = shard_of(spec, held, of=self.job.max_tp).shape
            return torch.empty(shape, device=self.device).uniform_(-0.05, 0.05)

        dtype = self._precision.master
        layers = [
            build_layer(self.job, index, **share, dtype=dtype, values=values)
            for index in self.indices
        ]
        tie(layers)
        return layers

    def micro_batch(self, samples: int) -> tuple[Tensor, MicroBatch]:
        """Return the input of the first layer, and the micro batch."""
        current = MicroBatch(self.job.data.seed, 0, torch.arange(samples, device=self.device))
        labels: Tensor | None = None
        if self._recipe is None:
            source = open_data(replace(self.job, data=Data(), global_batch=samples), base=Path())
            found = source.batch(0, range(samples))
            inputs, labels = found.inputs, found.labels
        else:
            inputs = self._recipe.longest_examples(samples)
        current.inputs = batch_on_device(
            inputs,
            of_module=self._recipe is not None,
            dtype=self._precision.compute,
            device=self.device,
        )
        if labels is not None:
            current.labels, current.label_count = labels.to(self.device), labels.numel()
        is_tensor = isinstance(current.inputs, Tensor)
        return current.inputs if is_tensor else torch.empty(0, device=self.device), current

    def round(self, x: Tensor, current: MicroBatch, mark: MarkPart) -> None:
        """Compute all layers forward and backward, marking the begin and the end of each pass."""
        runner = StageRunner(
            [_Marked(each, mark, each.index, each.tensors) for each in self.layers],
            recomputed=frozenset(),
            context=self._context,
            collect=self.collect_gradients,
            computes_loss=True,
        )
        mark()
        runner.forward(0, x, current=current)
        runner.backward(0, self._seed, layer_done=lambda _: mark())

    def layer_by_layer(self) -> list[Callable[[Tensor, MicroBatch], Tensor]]:
        """Return the computation of each layer, the loss included."""

        def computing(layer: HeldLayer) -> Callable[[Tensor, MicroBatch], Tensor]:
            def compute(x: Tensor, current: MicroBatch) -> Tensor:
                self._context.current = current
                return layer(x)

            return compute

        *others, head = self.layers
        return [*map(computing, others), head.losses]

    def loss_gradient(self, loss: Tensor) -> Tensor:
        """Return the gradient with which the backward pass begins."""
        return torch.full_like(loss, self._seed)

    def collect_gradients(self, index: int) -> None:
        """Add what a layer's backward pass left to the sums of its gradients."""
        self.buffers[index].collect_gradients()
        if TIED in self.buffers:
            self.buffers[TIED].collect_gradients()

    def weight_storages(self) -> set[int]:
        """Return the addresses of the weights: what a layer keeps of them takes no memory."""
        flats = [flat for b in self.buffers.values() for flat in (b.master, b.compute)]
        others = [p for layer in self.layers for p in _all_tensors(layer)]
        return {each.untyped_storage().data_ptr() for each in (*flats, *others)}

    def optimizer_round(self) -> tuple[int, Callable[[], None]] | None:
        """Return the number of weights of the largest layer, and what a step does to them.

        That is to zero the gradients, sum their squares, update, and derive the weights in which
        the model computes. The first layer and tensors that layers share do not count.
        """
        inner = [b for i, b in self.buffers.items() if b.master.numel() and i not in (0, TIED)]
        buffer = max(inner, key=lambda b: b.master.numel(), default=None)
        if buffer is None:
            return None
        moments = tuple(
            torch.zeros_like(buffer.master) for _ in range(OptimizerStep.moment_count(self.job))
        )
        job, is_gpu = self.job, buffer.master.device.type == "cuda"
        update = OptimizerStep(
            job.optimizer,
            job.learning_rate,
            1.0,
            10,
            job.update,
            is_fused=is_gpu and job.optimizer in FUSED,
        )
        groups = [(slice(0, buffer.master.numel()), ParameterGroup())]

        def run() -> None:
            buffer.begin_step()
            square_sum(buffer.gradient)
            update.apply_by_group(groups, buffer.master, buffer.gradient, moments)
            if buffer.compute is not buffer.master:
                self._precision.derive(buffer.master, into=buffer.compute)

        return buffer.master.numel(), run


def _all_tensors(layer: LocalLayer | ModuleLayer) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a layer, also frozen ones."""
    module = layer.module
    inner = module if isinstance(module, nn.Module) else module.module
    yield from inner.parameters()
    yield from inner.buffers()
