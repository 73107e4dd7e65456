"""Measures what a layer of a user's module costs, on the meta device where its code allows it.

Every operation of one forward and one backward pass is seen by a dispatch mode, which adds up its
FLOPs and the elements that it reads and writes, and knows at each moment which tensors are alive.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True, slots=True)
class PassCosts:
    """The costs of one layer for one batch."""

    flops: int
    """Of the forward pass: matrix products, a multiply-add counted as two."""
    kept: Mapping[torch.dtype, int]
    """Elements that autograd keeps from the forward to the backward pass, by their type."""
    transient_bytes: int
    """The peak of the backward pass beyond what is kept."""
    traffic: int
    """Elements read and written in the forward pass, parameters apart."""
    input: int
    """Elements of the input."""
    output: torch.Size
    has_gradient: bool
    """Whether the input gets a gradient."""


def pass_costs(
    compute: Callable[[Tensor], Tensor], hidden: Tensor, *, given: Iterable[Tensor]
) -> PassCosts:
    """Trace a forward and a backward pass, on the device of the tensors.

    ``given`` are tensors that exist anyway: buffers, and what the module's code passes to all
    blocks. They are not counted. Parameters that want gradients decide what autograd keeps.
    """
    meter = _Meter(given)
    hidden = hidden.detach()
    if hidden.is_floating_point():
        hidden.requires_grad_()
    with meter, _FusedAttention(meter):
        out = compute(hidden)
        flops, traffic = meter.flops, meter.traffic
        kept = meter.alive(without=out, also=hidden)
        meter.peak_bytes = before = meter.alive_bytes
        if out.requires_grad:
            torch.autograd.backward(out, torch.empty_like(out))
    transient_bytes = meter.peak_bytes - before
    has_gradient = hidden.grad is not None
    return PassCosts(flops, kept, transient_bytes, traffic, hidden.numel(), out.shape, has_gradient)


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Adds up what operations cost, and follows which tensors are alive."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.flops = self.traffic = self.alive_bytes = self.peak_bytes = 0
        self._given = {_storage(each) for each in given}
        self._alive: dict[int, tuple[torch.dtype, int]] = {}

    def __torch_dispatch__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if func._overloadpacket is torch.ops.aten._grouped_mm:
            # Each row is multiplied by one matrix of a stack, as those of experts are.
            self.flops += 2 * out.numel() * args[0].shape[-1]
        elif formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        taken, made = _tensors((args, kwargs)), _tensors(out)
        before = {_storage(each) for each in taken}
        new = [each for each in made if _storage(each) not in before]
        if new or func._schema.is_mutable:
            moved = [*(each for each in taken if _storage(each) not in self._given), *made]
            self.traffic += sum(each.numel() for each in moved)
        for each in new:
            self._follow(each)
        return out

    def _follow(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _storage(tensor)
        size = storage.nbytes()
        if key in self._alive or size == 0:
            return
        self._alive[key] = tensor.dtype, size // tensor.element_size()
        self.alive_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        del self._alive[key]
        self.alive_bytes -= size

    def alive(self, *, without: Tensor, also: Tensor) -> Mapping[torch.dtype, int]:
        """Return the elements of all tensors that are alive now, by type."""
        found: Counter[torch.dtype] = Counter({also.dtype: also.numel()})
        for key, (dtype, elements) in self._alive.items():
            if key != _storage(without):
                found[dtype] += elements
        return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


class _FusedAttention(TorchFunctionMode):
    """Replaces torch's attention by one that keeps no scores, as the kernels of GPUs do.

    On the meta device torch would choose its slow form.
    """

    def __init__(self, meter: _Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip(("query", "key", "value"), args, strict=False)), **(kwargs or {})}
        query, key, value = given["query"], given["key"], given["value"]
        rows = query.numel() // query.shape[-1]
        self._meter.flops += 2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        return _KeepsNoScores.apply(query, key, value)  # type: ignore[no-untyped-call]  # torch does not type it


class _KeepsNoScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004 - meta only
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
