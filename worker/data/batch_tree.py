"""Walks through what a script's code makes of samples: the parts of a batch, and its tensors."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


def parts_of(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a mapping, a tuple, a list or a dataclass; ``None``: it is a leaf."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return None


def with_parts(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a value like the given one with other parts.

    Named tuples, dataclasses and the classes of transformers keep their type, by whose attributes
    code may read them. Other mappings become dicts, and lists become tuples.
    """
    if isinstance(value, tuple | list):
        named = getattr(value, "_make", tuple) if isinstance(value, tuple) else tuple
        return named(parts.values())
    if not is_dataclass(value) and not isinstance(value, UserDict):
        return parts
    made = copy.copy(value)
    for name, part in parts.items():
        if isinstance(made, Mapping):
            made[name] = part
        else:
            object.__setattr__(made, name, part)  # Also of a frozen one.
    return made


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a value with its tensors changed, and its types as of ``with_parts``."""
    parts = parts_of(value)
    if parts is None:
        return tree_map_only(Tensor, change, value)
    return with_parts(value, {name: map_tensors(change, part) for name, part in parts.items()})


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield what has no parts, in order."""
    parts = parts_of(value)
    if parts is None:
        yield from tree_leaves(value)
    else:
        for part in parts.values():
            yield from leaves_of(part)
