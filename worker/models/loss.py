"""The loss of a micro batch: a sum over its labels, also for a split vocabulary."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from simulator.documents.problems import InputError, Problem
from worker.data.batch import NO_LABEL
from worker.distributed.interface import Collective


def loss_sum(
    logits: Tensor, labels: Tensor, *, vocabulary: int, group: Collective | None = None
) -> Tensor:
    """Return the sum of the cross entropies of all labels, computed in fp32 or higher.

    The last dimension of ``logits`` is the vocabulary, or this rank's shard of it if it is split
    over ``group``. Entries from ``vocabulary`` on are padding and never predicted.
    """
    flat = logits.flatten(0, -2)
    exact = flat.to(torch.promote_types(flat.dtype, torch.float32))
    if group is None or group.size == 1:
        real = exact[:, :vocabulary] if exact.shape[1] > vocabulary else exact
        return functional.cross_entropy(
            real, labels.flatten(), ignore_index=NO_LABEL, reduction="sum"
        )
    first = group.index * exact.shape[1]
    if first + exact.shape[1] > vocabulary:
        padding = torch.arange(first, first + exact.shape[1], device=exact.device) >= vocabulary
        exact = exact.masked_fill(padding, -torch.inf)
    loss: Tensor = _SplitCrossEntropy.apply(exact, labels.flatten(), first, group)  # type: ignore[no-untyped-call]  # torch does not type it
    return loss


def whole_or_nan(count: int | Tensor) -> int | Tensor:
    """Return the count of a loss for sums over micro batches, without waiting for the device.

    A tensor that is not whole becomes NaN, and so do the sums of it, which ``check_whole`` refuses.
    """
    if not isinstance(count, Tensor):
        check_whole(float(count))
        return int(count)
    wide = count.detach().double()
    return torch.where(wide == wide.round(), wide, torch.nan)


def check_whole(count: float) -> None:
    """Raise ``InputError`` if the count of a loss, or a sum of counts, is not whole."""
    if not float(count).is_integer():
        number = "" if math.isnan(count) else f" {count:g}"
        what = f"returns a count{number} that is not whole"
        raise InputError(Problem("loss", what, "count labels; weights belong into the sum alone"))


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross entropy over a vocabulary that is split over ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: Collective) -> Tensor:
        largest = group.all_reduce(logits.amax(1), op="max")
        shifted = logits - largest[:, None]
        local = labels - first
        here = (local >= 0) & (local < logits.shape[1])
        column = local.masked_fill(~here, 0)[:, None]
        wanted = shifted.gather(1, column)[:, 0].masked_fill_(~here, 0)
        probabilities = shifted.exp_()
        # One message for both, since they are summed over the same ranks.
        total, wanted = group.all_reduce(torch.stack((probabilities.sum(1), wanted)))
        counted = labels != NO_LABEL
        probabilities.div_(total[:, None])
        ctx.save_for_backward(probabilities, column, here, counted)
        each: Tensor = (total.log() - wanted).masked_fill_(~counted, 0)
        return each.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, column, here, counted = ctx.saved_tensors
        hit = here.to(probabilities.dtype)[:, None]
        change = probabilities.scatter_add(1, column, -hit)
        return change.mul_((counted * gradient)[:, None]), None, None, None
