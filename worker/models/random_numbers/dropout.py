"""Dropout of built-in models, the same under every plan; of a user's code: ``keyed_random``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from worker.models.random_numbers.counter_rng import dropout_mask, sample_keys, stream_key
from worker.models.random_numbers.microbatch_context import MicroBatchContext


class _ScaledMask(torch.autograd.Function):
    """Multiplies by a byte mask, which is all that is saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return x.mul(mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return gradient.mul(mask).mul_(ctx.scale), None, None


class KeyedDropout(nn.Module):
    """Dropout keyed by seed, step, sample, layer, site and position in the sample's full
    activation.

    The first dimension of the input is the samples of the micro batch. If the activation is split
    by its second dimension, as attention scores are by heads and under sequence parallelism others
    by tokens, this rank has share ``index``.
    """

    def __init__(
        self, probability: float, *, layer: int, site: str, index: int, context: MicroBatchContext
    ) -> None:
        super().__init__()
        self.p, self.layer, self.site = probability, layer, site
        self.index, self.context = index, context

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0:
            return x
        current = self.context.current
        assert current is not None, "no micro batch is set"
        assert len(current.samples) == len(x), "dropout needs the samples along the first dimension"
        key = stream_key("dropout", current.seed, current.step, self.layer, self.site)
        keys = sample_keys(key, current.samples.to(x.device))
        size = x[0].numel()
        mask = dropout_mask(keys, range(self.index * size, (self.index + 1) * size), self.p)
        scale = 1 / (1 - self.p)
        return _ScaledMask.apply(x, mask.view(x.shape), scale)  # type: ignore[no-any-return, no-untyped-call]  # torch does not type it
