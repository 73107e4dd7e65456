"""A language model whose results are bit-equal in any order of summation, for tests.

Its values are fixed-point numbers in fp64: multiples of a small power of two below a bound. Sums of
their products need fewer than 53 bits, so they are exact whichever rank adds first. Numbers are
rounded to their grid before every matrix product and on the gradient's way back; only sums over all
ranks are rounded. There are no exponentials or logarithms: attention weighs by the raw scores,
norms only scale and shift, and the loss is the squared distance from 1 at the label and 0
elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from simulator.documents.problems import Problem
from simulator.models.architecture import Architecture
from simulator.models.layers import Model
from simulator.spec.job import Job
from worker.data.batch import NO_LABEL
from worker.distributed.interface import Collective
from worker.models.built_in.attention import Attention
from worker.models.built_in.block import MLP, Block
from worker.models.built_in.embedding_and_head import LanguageHead, TokenEmbedding
from worker.models.built_in.tensor_parallel import TpGroup

# Fraction bits and bounds of activations and gradients; those of weights are in precision.py. A
# product of two values has at most 36 bits; the rest of the 53 is for the number of terms.
_STATE, _STATE_MAX = 2.0**12, 2.0**4
_GRADIENT, _GRADIENT_MAX = 2.0**18, 2.0**2
TERMS_MAX = 2**16
"""The most tokens of a batch, and the widest layer, whose sums are exact."""
LOGITS_MAX = 2**20
"""The most logits of a batch whose sum of squares is exact."""


def _round(x: Tensor, scale: float, bound: float) -> Tensor:
    return x.mul(scale).round_().div_(scale).clamp_(-bound, bound)


class _RoundToGrid(torch.autograd.Function):
    """Rounds an activation in the forward pass and its gradient in the backward pass."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return _round(x, _STATE, _STATE_MAX)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return _round(gradient, _GRADIENT, _GRADIENT_MAX)


def to_grid(x: Tensor) -> Tensor:
    """Round an activation to its grid, and its gradient to that of gradients."""
    return _RoundToGrid.apply(x)  # type: ignore[no-any-return, no-untyped-call]  # torch does not type it


class _ScaleShift(nn.Module):
    """Replaces the norm: scales and shifts each feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return to_grid(to_grid(x) * self.weight + self.bias)


class _Attention(Attention):
    """Attention without softmax: each earlier token adds its value times its score."""

    def __init__(self, job: Job, architecture: Architecture, index: int) -> None:
        super().__init__(job, architecture, index)
        self.norm = _ScaleShift(job.model.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        query, key, value = self.heads(x)
        # Rounded after repeating: gradients of heads that share a key may be summed over ranks, and
        # must be on the grid before that.
        times = query.shape[1] // key.shape[1]
        key, value = (to_grid(each.repeat_interleave(times, 1)) for each in (key, value))
        # A power of two, which rounds nothing; close to the mean over all tokens.
        scale = 2.0 ** -x.shape[1].bit_length()
        scores = to_grid((to_grid(query) @ key.transpose(-1, -2)).tril() * scale)
        attended = to_grid(to_grid(self.dropout(scores)) @ value)
        out: Tensor = to_grid(self.output(attended.transpose(1, 2).flatten(2)))
        return out


class _MLP(MLP):
    """Two linear layers around a ReLU."""

    def __init__(self, job: Job, architecture: Architecture, index: int) -> None:
        super().__init__(job, architecture, index)
        self.norm = _ScaleShift(job.model.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return to_grid(self.down(to_grid(self.up(self.entry(x))).relu()))


class ExactBlock(Block):
    """A transformer block of the exact model."""

    def __init__(self, job: Job, architecture: Architecture, index: int) -> None:
        super().__init__(job, architecture, index)
        self.attention = _Attention(job, architecture, index)
        self.mlp = _MLP(job, architecture, index)

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp = self.attention, self.mlp
        x = to_grid(x + to_grid(self.attention_dropout(attention(attention.norm(x)))))
        return to_grid(x + to_grid(self.mlp_dropout(mlp(mlp.norm(x)))))


class ExactEmbedding(TokenEmbedding):
    """Token and position embeddings of the exact model."""

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.position is not None, "an exact model has positions"
        x = self.token(tokens) + self.own_rows(self.position.weight[: tokens.shape[1]])
        return to_grid(self.dropout(to_grid(x)))


class ExactHead(LanguageHead):
    """The head of the exact model, whose loss is a sum of squares."""

    def __init__(self, model: Model, architecture: Architecture) -> None:
        super().__init__(model, architecture)
        self.norm = _ScaleShift(model.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return to_grid(super().forward(x))

    def loss_sum(
        self, logits: Tensor, labels: Tensor, *, vocabulary: int, group: Collective | None
    ) -> Tensor:
        """Return half the sum over all labels of the squared distances of their logits."""
        first = 0 if group is None else group.index * logits.shape[-1]
        token = torch.arange(first, first + logits.shape[-1], device=logits.device)
        distance = logits - (token == labels[..., None]).to(logits.dtype)
        counted = (token < vocabulary) & (labels != NO_LABEL)[..., None]
        total = distance.square().mul(counted).sum() / 2
        return total if group is None else TpGroup(group).end(total)


def exact_layer(job: Job, architecture: Architecture, index: int) -> nn.Module:
    """Build one layer of an exact model."""
    match job.model.layers[index].kind:
        case "embedding":
            return ExactEmbedding(job, architecture)
        case "block":
            return ExactBlock(job, architecture, index)
        case "head":
            return ExactHead(job.model, architecture)


def exact_problems(job: Job) -> tuple[Problem, ...]:
    """List what the exact model does not support in a job."""
    model, architecture = job.model, job.model.architecture
    assert architecture is not None
    found = []
    terms = max(job.global_batch * job.sequence, model.hidden, model.ffn, model.vocab)
    if terms > TERMS_MAX:
        what = f"an exact model adds up to {terms} numbers, more than stay exact"
        cure = f"make no batch and no layer larger than {TERMS_MAX}"
        found.append(Problem("[training]", what, cure))
    logits = job.global_batch * job.sequence * model.vocab
    if logits > LOGITS_MAX:
        what = f"a batch of an exact model has {logits} logits, more than sum up exactly"
        cure = f"make batch x sequence x vocabulary at most {LOGITS_MAX}"
        found.append(Problem("[training]", what, cure))
    like = (architecture.nonlinearity, architecture.norm_first, architecture.embedding_width)
    if like != ("relu", True, model.hidden):
        what = "an exact model has ReLUs, norms first and one width"
        found.append(Problem("[model]", what, "leave these numbers out"))
    return tuple(found)
