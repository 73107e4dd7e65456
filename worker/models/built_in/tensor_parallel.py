"""Tensor-parallel parts of a layer, each holding one rank's shard.

Activations between layers are held in full by every rank. A split part lies between an *entry*,
whose gradient is summed over the ranks, and a *rows* linear layer, whose output is: a block has two
sums in each direction.

Under sequence parallelism each rank holds its own tokens between split parts. An entry gathers all
of them, and where a part ends each rank gets its tokens of the sum; backward each does the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.distributed.interface import Collective
from worker.distributed.token_shares import gather_tokens, own_tokens, sum_own_tokens
from worker.models.built_in.aligned_linear import aligned_linear


class _CopyToTp(torch.autograd.Function):
    """Identity in the forward pass; sums the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(gradient.contiguous()), None


class _ReduceFromTp(torch.autograd.Function):
    """Sums over the ranks in the forward pass; identity in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective) -> Tensor:
        ctx.mark_dirty(x)
        return group.all_reduce(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherTokens(torch.autograd.Function):
    """Gathers all tokens in the forward pass; sums the gradient of each rank's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective) -> Tensor:
        ctx.group = group
        return gather_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sum_own_tokens(gradient, ctx.group), None


class _SumOwnTokens(torch.autograd.Function):
    """Sums each rank's own tokens in the forward pass; gathers the gradient of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective) -> Tensor:
        ctx.group = group
        return sum_own_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gather_tokens(gradient, ctx.group), None


@dataclass(frozen=True, slots=True)
class TpGroup:
    """The ranks that split a layer, and what they hold between its split parts."""

    ranks: Collective
    shares_tokens: bool = False
    """Each rank has its own tokens there (sequence parallelism), not all."""

    def begin(self, x: Tensor) -> Tensor:
        """Begin a split part: return all tokens."""
        begin = _GatherTokens if self.shares_tokens else _CopyToTp
        return begin.apply(x, self.ranks)  # type: ignore[no-any-return, no-untyped-call]  # torch does not type it

    def end(self, x: Tensor) -> Tensor:
        """End a split part: sum the ranks' partial results, in place if every rank keeps all."""
        end = _SumOwnTokens if self.shares_tokens else _ReduceFromTp
        return end.apply(x, self.ranks)  # type: ignore[no-any-return, no-untyped-call]  # torch does not type it


class TpEntry(nn.Module):
    """Stands before all columns of a part, so that their input gradients are summed once."""

    def __init__(self, group: TpGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return self.group.begin(x)


class OwnTokens(nn.Module):
    """Selects this rank's tokens of something that every rank computes for one whole sample."""

    def __init__(self, group: Collective) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return own_tokens(x, self.group, dim=0)


class SharedEntry:
    """Begins a split part once for all columns that take the same tensor."""

    def __init__(self, group: TpGroup) -> None:
        self._group = group
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not x:
            self._last = x, self._group.begin(x)
        return self._last[1]

    def clear(self) -> None:
        """Forget the last tensor, so that its memory can be freed."""
        self._last = None


class PartialLinear(nn.Module):
    """One rank's shard of a linear layer; takes over its parameters."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = whole.weight
        self.bias: nn.Parameter | None = whole.bias


class ColumnLinear(PartialLinear):
    """Some outputs of a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return aligned_linear(x, self.weight, self.bias)


class EntryLinear(ColumnLinear):
    """Some outputs of a linear layer, behind an entry that it may share with others."""

    def __init__(self, whole: nn.Linear, entry: Callable[[Tensor], Tensor]) -> None:
        super().__init__(whole)
        self._entry = entry

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self._entry(x))


class SharedColumns(PartialLinear):
    """A linear layer that every rank holds in full but computes only some outputs of.

    Used for keys and values if there are fewer heads of them than ranks: each rank computes those
    that its query heads attend to, and so has a part of the gradient.
    """

    def __init__(self, whole: nn.Linear, used: slice) -> None:
        super().__init__(whole)
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias[self.used] if self.bias is not None else None
        return functional.linear(x, self.weight[self.used], bias)


class RowLinear(PartialLinear):
    """Some inputs of a linear layer; the ranks' results are summed, then the bias is added."""

    def __init__(self, whole: nn.Linear, group: TpGroup) -> None:
        super().__init__(whole)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        out = self.group.end(functional.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class VocabularyEmbedding(nn.Module):
    """Some rows of an embedding; tokens of other ranks' rows contribute 0."""

    def __init__(self, whole: nn.Embedding, group: TpGroup) -> None:
        super().__init__()
        self.weight = whole.weight
        self.group = group

    def forward(self, tokens: Tensor) -> Tensor:
        rows = len(self.weight)
        local = tokens - self.group.ranks.index * rows
        elsewhere = (local < 0) | (local >= rows)
        found = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.group.end(found.masked_fill(elsewhere[..., None], 0))
