"""The forward and backward passes of one rank's layers.

Each layer is a separate autograd graph. So a layer's gradients are complete, and their sum over the
replicas can start, while the layers before it are still computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# Autograd imports this at its first gradient, in half a second. Importing it here does so once, in
# the process from which all ranks are forked.
import torch.fx.experimental.symbolic_shapes
from torch import Tensor

from worker.models.apply_plan import HeldLayer, Metrics
from worker.models.random_numbers.microbatch_context import MicroBatch, MicroBatchContext

Computation = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class _SavedForward:
    """What a layer's backward pass needs from its forward pass."""

    compute: Computation
    input: Tensor
    output: Tensor | None
    """``None``: recompute it from the input."""


class StageRunner:
    """One rank's layers, and what is saved for their backward passes."""

    def __init__(
        self,
        layers: Sequence[HeldLayer],
        *,
        recomputed: frozenset[int],
        context: MicroBatchContext,
        collect: Callable[[int], None],
        computes_loss: bool,
    ) -> None:
        self.layers = tuple(layers)
        self._recomputed = recomputed
        self._context = context
        self._collect = collect
        self._computes_loss = computes_loss
        self._kept: dict[int, tuple[MicroBatch, list[_SavedForward]]] = {}

    def forward(self, micro_batch: int, x: Tensor, *, current: MicroBatch) -> Tensor:
        """Run a forward pass; on the last stage, return the sum of the losses."""
        self._context.current = current
        kept: list[_SavedForward] = []
        for layer, compute in zip(self.layers, self._computations(current), strict=True):
            x = x.detach()
            if x.is_floating_point():
                x.requires_grad_()
            again = layer.index in self._recomputed
            with torch.set_grad_enabled(not again):
                output = compute(x)
            kept.append(_SavedForward(compute, x, None if again else output))
            x = output
        self._kept[micro_batch] = (current, kept)
        return x.detach()

    def backward(
        self, micro_batch: int, gradient: Tensor | float, *, layer_done: Callable[[int], None]
    ) -> Tensor | None:
        """Add to the layers' gradients; return the gradient of the input, if it has one.

        ``gradient`` is the gradient of the output; for a loss it is a number. ``layer_done`` is
        called with each layer's number as soon as its backward pass is over.
        """
        current, kept = self._kept.pop(micro_batch)
        incoming: Tensor | float | None = gradient
        for layer in reversed(self.layers):
            part = kept.pop()
            if part.output is None:
                # The recomputed pass must apply the same dropout masks.
                self._context.current = current
                with torch.enable_grad():
                    part.output = part.compute(part.input)
            if isinstance(incoming, float):
                incoming = torch.full_like(part.output, incoming)
            if part.output.requires_grad:  # Not of a frozen embedding.
                torch.autograd.backward(part.output, incoming)
            incoming = part.input.grad
            if incoming is None and part.input.requires_grad:
                incoming = torch.zeros_like(part.input)  # A frozen part is in front of detach().
            self._collect(layer.index)
            layer_done(layer.index)
        assert not isinstance(incoming, float)
        return incoming

    def first_bad_layer(self, x: Tensor, *, current: MicroBatch) -> tuple[int | None, Tensor]:
        """Run a forward pass and return the first layer with a non-finite output."""
        self._context.current = current
        bad: int | None = None
        with torch.no_grad():
            for layer, compute in zip(self.layers, self._computations(current), strict=True):
                x = compute(x)
                if bad is None and not torch.isfinite(x).all():
                    bad = layer.index
        return bad, x

    def evaluate(self, x: Tensor, *, current: MicroBatch) -> Tensor | Metrics:
        """Run a forward pass without gradients; the last stage returns metrics."""
        self._context.current = current
        *others, last = self.layers
        with torch.no_grad():
            for layer in others:
                x = layer(x)
            return last.metrics(x, current) if self._computes_loss else last(x)

    def _computations(self, current: MicroBatch) -> list[Computation]:
        if not self._computes_loss:
            return list(self.layers)
        *others, head = self.layers
        return [*others, lambda x: head.losses(x, current)]
