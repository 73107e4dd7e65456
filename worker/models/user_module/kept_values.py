"""What a module keeps from one pass to the next, beside its parameters and buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_NUMEL_MAX = 2**16
"""Larger tensors are caches and activations rather than averages and counts."""
_ITEMS_MAX = 100
_OF_TORCH = frozenset(vars(nn.Module()))

KeptValues = Mapping[str, Any]
"""Numbers and small tensors by their names in the module."""


def kept_values(module: nn.Module) -> KeptValues:
    """Return the numbers and small tensors that the parts of a module have as attributes now."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in _OF_TORCH:
                continue
            full = f"{path}.{name}".lstrip(".")
            for key, each in _items_of(value):
                if isinstance(each, Tensor) and each.numel() <= _NUMEL_MAX:
                    found[f"{full}{key}"] = each.detach().clone()
                elif isinstance(each, int | float) and not isinstance(each, bool):
                    found[f"{full}{key}"] = each
    return found


def _items_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value, or what a short list or mapping of values holds, with its place there."""
    if isinstance(value, dict | list) and len(value) <= _ITEMS_MAX:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"[{key!r}]", each) for key, each in pairs)
    else:
        yield "", value


def changed_value(before: KeptValues, after: KeptValues) -> str | None:
    """Return the name of a value that both have, and that differs; ``None``: there is none."""
    shared = (name for name in before if name in after)
    return next((name for name in shared if not _equal(before[name], after[name])), None)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # Other shapes or types are those of other samples.
        alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return not alike or torch.equal(one.nan_to_num(), other.nan_to_num())
    return type(one) is not type(other) or one == other or math.isnan(one)
