"""What functions of a script read of variables outside of them, which a callback may change.

A callback runs on one rank, the loss, the data set and the like on several.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from worker.closure import closure_values

_ITEMS_MAX = 100
_NUMEL_MAX = 2**10

OutsideValues = Mapping[tuple[str, str], Any]
"""Numbers, texts and small tensors, by the name of a variable and what uses it."""


def outside_values(used: Mapping[str, Any]) -> OutsideValues:
    """Return the present values of the variables that some functions and objects name."""
    return {
        (f"{name}{key}".lstrip("."), place): value
        for place, each in used.items()
        for name, variable, code_names in _variables_of(each)
        for key, value in _plain_values(variable, code_names)
    }


def changed_variable(before: OutsideValues, after: OutsideValues) -> tuple[str, str] | None:
    """Return a variable that has changed, and what uses it; ``None``: there is none."""
    return next((each for each in after if before.get(each) != after[each]), None)


def _variables_of(used: Any) -> Iterator[tuple[str, Any, frozenset[str]]]:
    """Yield variables with their names, and all names in the code that uses them."""
    if isinstance(used, partial):
        used = used.func
    function, owner = _code_of(used)
    if function is None:
        return
    code = function.__code__
    texts = (each for each in code.co_consts if isinstance(each, str))
    names = frozenset((*code.co_names, *texts))
    if owner is not None:
        yield "", owner, names
    for name, value in closure_values(function).items():
        yield name, value, names
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL" and each.argval in function.__globals__:
            yield each.argval, function.__globals__[each.argval], names


def _code_of(used: Any) -> tuple[Any, Any]:
    """Return the function that is called, and the object that it belongs to."""
    if inspect.isfunction(used):
        return inspect.unwrap(used), None
    if inspect.ismethod(used):
        return used.__func__, used.__self__
    for name in ("forward", "__call__", "__getitem__"):
        function = getattr(type(used), name, None)
        if inspect.isfunction(function):
            return function, used
    return None, None


def _plain_values(value: Any, names: frozenset[str], depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Yield numbers, texts and small tensors of a variable: of objects what the code names."""
    if isinstance(value, bool | int | float | str):
        # As text: NaN differs from itself.
        yield "", repr(value) if isinstance(value, float) else value
    elif isinstance(value, Tensor):
        if value.numel() <= _NUMEL_MAX and not (value.is_meta or value.is_sparse):
            yield "", repr(value.tolist())
    elif depth and isinstance(value, list | tuple) and len(value) <= _ITEMS_MAX:
        for number, each in enumerate(value):
            yield from _with_key(f"[{number}]", each, names, depth)
    elif depth and isinstance(value, dict):
        for key in names & value.keys():
            yield from _with_key(f"[{key!r}]", value[key], names, depth)
    elif depth:  # Modules and classes hold settings, too.
        attributes = getattr(value, "__dict__", {})
        for key in names & attributes.keys():
            yield from _with_key(f".{key}", attributes[key], names, depth)


def _with_key(key: str, value: Any, names: frozenset[str], depth: int) -> Iterator[tuple[str, Any]]:
    yield from ((f"{key}{more}", each) for more, each in _plain_values(value, names, depth - 1))
