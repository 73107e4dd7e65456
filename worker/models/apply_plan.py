"""Applies a plan to a layer: builds what one rank holds of it.

The layer is built on the meta device, without memory. The parts that it declares as splittable
(``worker.layout.split_spec``) are replaced by one rank's shard, and then its parameters get memory
and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from simulator.spec.job import Job
from worker.distributed.interface import Collective
from worker.layout.rank_layout import atoms_held
from worker.layout.split_spec import splits_of
from worker.layout.tensor_table import table_of
from worker.models.built_in.builtin import builtin_layer
from worker.models.built_in.tensor_parallel import (
    ColumnLinear,
    OwnTokens,
    RowLinear,
    SharedColumns,
    TpEntry,
    TpGroup,
    VocabularyEmbedding,
)
from worker.models.loss import loss_sum
from worker.models.random_numbers.dropout import KeyedDropout
from worker.models.random_numbers.microbatch_context import MicroBatch, MicroBatchContext
from worker.models.random_numbers.weight_init import initial_shard
from worker.types import LogicalTensor

ShardValues = Callable[[LogicalTensor, range], Tensor]
"""Returns the initial values of the shard that a rank with these atoms holds."""


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One tensor of a layer, and the parameter that holds this rank's shard of it."""

    spec: LogicalTensor
    parameter: nn.Parameter


Metrics = Mapping[str, tuple[Tensor, int | Tensor]]
"""The loss and other metrics of an evaluation, each as a sum and a count."""


class HeldLayer(Protocol):
    """A layer as a rank holds it: a known one, or a part of a user's module."""

    index: int
    tensors: tuple[LocalTensor, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer."""

    def losses(self, x: Tensor, current: MicroBatch) -> Tensor:
        """Compute this layer, which must be the head, and the sum of the losses."""

    def metrics(self, x: Tensor, current: MicroBatch) -> Metrics:
        """Compute this layer, which must be the head, and the metrics of an evaluation."""

    def set_training(self, on: bool) -> None:
        """Switch between training, with dropout, and evaluation."""


@dataclass(slots=True)
class LocalLayer:
    """One layer as one rank holds it."""

    index: int
    module: nn.Module
    tensors: tuple[LocalTensor, ...]
    vocabulary: int
    # The ranks among which this layer's logits are split; ``None``: each has all of them.
    loss_group: Collective | None

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x)
        return out

    def losses(self, x: Tensor, current: MicroBatch) -> Tensor:
        """Compute this layer, which must be the head, and the sum of the losses of all labels."""
        assert current.labels is not None, "the last stage has labels"
        return self.loss_sum(self(x), current.labels)

    def metrics(self, x: Tensor, current: MicroBatch) -> Metrics:
        """Compute this layer, which must be the head, and the loss."""
        return {"loss": (self.losses(x, current), current.label_count)}

    def set_training(self, on: bool) -> None:
        """Switch between training, with dropout, and evaluation."""
        self.module.train(on)

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of all labels; this layer must be the head."""
        # A head may define its own loss.
        loss = getattr(self.module, "loss_sum", loss_sum)
        total: Tensor = loss(logits, labels, vocabulary=self.vocabulary, group=self.loss_group)
        return total


@dataclass(frozen=True, slots=True)
class _TpShare:
    """The share of each layer that a rank has."""

    tp: int
    index: int
    group: Collective | None
    shares_tokens: bool


def build_layer(
    job: Job,
    index: int,
    *,
    tp: int,
    tp_index: int,
    group: Collective | None,
    context: MicroBatchContext,
    dtype: torch.dtype,
    device: torch.device | str,
    values: ShardValues | None = None,
    shares_tokens: bool = False,
) -> LocalLayer:
    """Build what a rank holds of one layer; ``values`` replaces the job's initial weights.

    ``shares_tokens``: the ranks of the group use sequence parallelism.
    """
    assert (group is None) == (tp == 1), "ranks that share a layer need a group"
    share = _TpShare(tp, tp_index, group, shares_tokens and group is not None)
    with torch.device("meta"), _SkipRandomInit():
        module = builtin_layer(job, index)
    table = table_of(job, index)
    loss_group = _split(module, job, index, share, {spec.name: spec for spec in table})
    _key_dropout(module, index, share, context)
    held = atoms_held(tp=tp, index=tp_index, atoms=job.max_tp)
    tensors = []
    for spec in table:
        if values is None:
            shard = initial_shard(job, index, spec, held, dtype=dtype, device=device)
        else:
            shard = values(spec, held).to(device=device, dtype=dtype)
        parameter = nn.Parameter(shard)
        _set_parameter(module, spec.name, parameter)
        tensors.append(LocalTensor(spec, parameter))
    named = {name for name, _ in module.named_parameters()}
    left = named - {spec.name for spec in table}
    assert not left, f"layer {index} has parameters that are not in its table: {left}"
    return LocalLayer(index, module, tuple(tensors), job.model.vocab, loss_group)


def build_layers(
    job: Job,
    indices: Iterable[int],
    *,
    tp: int = 1,
    tp_index: int = 0,
    group: Collective | None = None,
    context: MicroBatchContext,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    weights: Callable[[int], ShardValues] | None = None,
    shares_tokens: bool = False,
) -> list[LocalLayer]:
    """Build and tie what a rank holds of some layers; ``weights`` replaces initial weights."""
    layers = [
        build_layer(
            job,
            index,
            tp=tp,
            tp_index=tp_index,
            group=group,
            context=context,
            dtype=dtype,
            device=device,
            values=None if weights is None else weights(index),
            shares_tokens=shares_tokens,
        )
        for index in indices
    ]
    tie(layers)
    return layers


_INIT_FUNCTIONS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class _SkipRandomInit(TorchFunctionMode):
    """Skips torch's random initialisation, whose values are overwritten.

    On the meta device it takes a second, since torch imports its compiler for it.
    """

    def __torch_function__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _INIT_FUNCTIONS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _split(
    module: nn.Module, job: Job, index: int, share: _TpShare, table: dict[str, LogicalTensor]
) -> Collective | None:
    """Replace the splittable parts of a layer; return the group that shares its logits."""
    if share.group is None:
        return None
    group = TpGroup(share.group, shares_tokens=share.shares_tokens)
    loss_group = None
    splits = splits_of(module)
    for path, how in splits.items():
        parent, _, name = path.rpartition(".")
        owner = module.get_submodule(parent)
        # A layer may declare parts that it has only in some configurations, such as a gate.
        whole = getattr(owner, name, None)
        match how, whole:
            case "entry", nn.Identity():
                setattr(owner, name, TpEntry(group))
            case "columns" | "vocabulary", nn.Linear():
                setattr(owner, name, _columns(whole, job, index, path, share, table))
                if how == "vocabulary":
                    loss_group = share.group
            case "tokens", nn.Identity():
                if share.shares_tokens:
                    setattr(owner, name, OwnTokens(share.group))
            case "rows", nn.Linear():
                setattr(owner, name, RowLinear(whole, group))
            case "vocabulary", nn.Embedding():
                setattr(owner, name, VocabularyEmbedding(whole, group))
            case _:
                assert whole is None or how == "heads", f"{path} cannot be split by {how}"
    return loss_group


def _columns(
    whole: nn.Linear,
    job: Job,
    index: int,
    path: str,
    share: _TpShare,
    table: dict[str, LogicalTensor],
) -> nn.Module:
    if table[f"{path}.weight"].split_dim is not None:
        return ColumnLinear(whole)
    # Every rank holds all pieces, one for each head, and uses those of its own heads.
    ways = {t.name: t.ways for t in job.model.layers[index].tensors}[f"{path}.weight"]
    piece = whole.out_features // ways
    first = share.index * ways // share.tp
    end = max((share.index + 1) * ways // share.tp, first + 1)
    return SharedColumns(whole, slice(first * piece, end * piece))


def _key_dropout(
    module: nn.Module, index: int, share: _TpShare, context: MicroBatchContext
) -> None:
    """Replace torch's dropout by one that depends on the sample and not on the plan."""
    splits = splits_of(module)
    found = [(path, each) for path, each in module.named_modules() if type(each) is nn.Dropout]
    for path, dropout in found:
        is_split = share.shares_tokens or splits.get(path) == "heads"
        part = share.index if is_split else 0
        keyed = KeyedDropout(dropout.p, layer=index, site=path, index=part, context=context)
        module.set_submodule(path, keyed)


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    assert attribute in owner._parameters, f"the layer has no parameter {name}"
    setattr(owner, attribute, parameter)


def tie(layers: Sequence[LocalLayer]) -> None:
    """Let a rank that holds both uses of a tied tensor share the one of layer 0."""
    first = next((layer for layer in layers if layer.index == 0), None)
    if first is None:
        return
    owned = {tensor.spec.name: tensor.parameter for tensor in first.tensors}
    for layer in layers:
        tensors = []
        for tensor in layer.tensors:
            name = tensor.spec.tied_name
            parameter = tensor.parameter if name is None else owned[name]
            if parameter is not tensor.parameter:
                _set_parameter(layer.module, tensor.spec.name, parameter)
            tensors.append(LocalTensor(tensor.spec, parameter))
        layer.tensors = tuple(tensors)
