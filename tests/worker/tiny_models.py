"""Small models of every family, and one pass over them by any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from simulator.models.families import build_model
from simulator.models.layers import Model
from simulator.spec.job import Data, Job
from tests.worker.threads import ThreadTransport, run_as_threads
from worker.distributed.interface import Collective
from worker.models.apply_plan import LocalLayer, build_layers
from worker.models.random_numbers.microbatch_context import MicroBatch, MicroBatchContext

SMALL: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "ffn": 24}
# A vocabulary of 37 is not a multiple of any number of ranks.
TEXT: dict[str, Any] = {**SMALL, "vocab": 37, "sequence": 12}
MODELS: dict[str, Callable[..., Model]] = {
    "gpt2": lambda **more: build_model("gpt2", **{**TEXT, **more}),
    "gpt2-untied": lambda **more: build_model("gpt2", **{**TEXT, "tied": False, **more}),
    "gpt-neo": lambda **more: build_model("gpt-neo", **{**TEXT, **more}),
    "opt": lambda **more: build_model("opt", **{**TEXT, **more}),
    "opt-last": lambda **more: build_model(
        "opt", **{**TEXT, "norm_first": False, "embedding_width": 8, **more}
    ),
    "llama": lambda **more: build_model("llama", **{**TEXT, **more}),
    "llama-grouped": lambda **more: build_model("llama", **{**TEXT, "kv_heads": 2, **more}),
    "llama-one-kv": lambda **more: build_model(
        "llama", **{**TEXT, "kv_heads": 1, "qkv_bias": True, "tied": True, **more}
    ),
    "vit": lambda **more: build_model(
        "vit", **{**SMALL, "image": 12, "patch": 4, "classes": 7, **more}
    ),
}
BATCH = 3


def job_of(name: str, **training: Any) -> Job:
    """Return a job for one of the models; ``training`` sets the job's other fields."""
    dropout = training.get("dropout", 0.0)
    model = MODELS[name](dropout=dropout > 0)
    fixed = {"global_batch": 8, "sequence": model.sequence_max, "data": Data(seed=5)}
    return Job(name=name, model=model, **{**fixed, **training})


def batch_of(job: Job, *, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, some of them ``NO_LABEL``."""
    draw = torch.Generator().manual_seed(11)
    architecture = job.model.architecture
    if architecture is not None and architecture.image:
        size = (batch, architecture.channels, architecture.image, architecture.image)
        images = torch.randn(size, generator=draw, dtype=torch.float64)
        return images, torch.randint(job.model.vocab, (batch,), generator=draw)
    tokens = torch.randint(job.model.vocab, (batch, job.sequence), generator=draw)
    labels = torch.randint(job.model.vocab, (batch, job.sequence), generator=draw)
    labels[0, :3] = -100
    return tokens, labels


@dataclass(slots=True)
class Pass:
    """The result of one micro batch, on one rank or merged."""

    states: list[Tensor]
    loss: Tensor
    gradients: dict[tuple[int, str], Tensor] = field(default_factory=dict)


def layers_of(
    job: Job, *, tp: int, index: int, group: Collective | None, dtype: torch.dtype = torch.float64
) -> list[LocalLayer]:
    """Build all layers as one rank holds them, with tied layers tied."""
    now = MicroBatch(seed=3, step=7, samples=torch.tensor([4, 0, 6]))
    share = {"tp": tp, "tp_index": index, "group": group}
    everything = range(len(job.model.layers))
    return build_layers(job, everything, context=MicroBatchContext(now), dtype=dtype, **share)


def one_pass(job: Job, layers: list[LocalLayer], *, recompute: bool = False) -> Pass:
    """Run forward and backward; the gradients are this rank's own."""
    x, labels = batch_of(job)
    states = []
    for layer in layers:
        blocks = 0 < layer.index < len(layers) - 1
        x = checkpoint(layer, x, use_reentrant=False) if recompute and blocks else layer(x)
        states.append(x.detach())
    loss = layers[-1].loss_sum(x, labels)
    loss.backward()
    gradients = {
        (layer.index, tensor.spec.name): tensor.parameter.grad
        for layer in layers
        for tensor in layer.tensors
        if tensor.parameter.grad is not None
    }
    return Pass(states, loss.detach(), gradients)


def together(job: Job, tp: int, *, recompute: bool = False) -> Pass:
    """Run one micro batch on ``tp`` ranks and merge their results."""

    def body(transport: ThreadTransport) -> Pass:
        group = transport.group(tuple(range(tp))) if tp > 1 else None
        layers = layers_of(job, tp=tp, index=transport.rank, group=group)
        return one_pass(job, layers, recompute=recompute)

    passes = run_as_threads(tp, body)
    table = layers_of(job, tp=1, index=0, group=None)
    gradients = {}
    for layer in table:
        for tensor in layer.tensors:
            key = (layer.index, tensor.spec.name)
            shares = [each.gradients[key] for each in passes]
            gradients[key] = _whole(tensor.spec.split_dim, tensor.spec.gradient, shares)
    states = passes[0].states[:-1]
    last = [each.states[-1] for each in passes]
    cut = table[-1].tensors[-1].spec.split_dim is not None
    states.append(torch.cat(last, -1) if cut else last[0])
    for each in passes:
        assert torch.equal(each.loss, passes[0].loss), "ranks disagree about the loss"
        for mine, first in zip(each.states[:-1], passes[0].states, strict=False):
            assert torch.equal(mine, first), "ranks disagree about a state between layers"
    return Pass(states, passes[0].loss, gradients)


def _whole(split_dim: int | None, gradient: str, shares: list[Tensor]) -> Tensor:
    if split_dim is not None:
        return torch.cat(shares, split_dim)
    if gradient == "partial":
        return torch.stack(shares).sum(0)
    for share in shares:
        assert torch.equal(share, shares[0]), "ranks disagree about a gradient that is the same"
    return shares[0]
