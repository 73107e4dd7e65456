"""A module whose parameters take no memory, for code that only needs their shapes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from simulator.documents.problems import InputError, Problem
from worker.data.batch_tree import leaves_of


def copied(module: nn.Module, known: Mapping[int, Any]) -> nn.Module:
    """Copy a module, but for the objects that are ``known`` by their ``id``.

    What it keeps of earlier passes is taken over without its gradients, of which torch makes no
    copies; a next pass computes it anew.
    """
    try:
        return copy.deepcopy(module, memo=dict(known))
    except (RuntimeError, TypeError):
        kept = {id(each): each.detach() for _, each in _kept_by(module) if _is_computed(each)}
    try:
        return copy.deepcopy(module, memo={**known, **kept})
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
    what, cure = f"cannot be copied: {reason}", "keep that outside of the model"
    for name, each in _kept_by(module):
        try:
            copy.deepcopy(each, memo={**known, **kept})
        except (RuntimeError, TypeError):
            what = f"cannot be copied, for {name} is a {type(each).__name__}: {reason}"
            cure = "make it in the forward pass, or keep it outside of the model"
            break
    raise InputError(Problem("model", what, cure))


def _kept_by(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what the parts of a module keep beside parameters and parts, with their names."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_modules"):
                for each in leaves_of(value):
                    yield f"{path}.{name}".lstrip("."), each


def _is_computed(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_leaf


def without_values(module: nn.Module, *, shared: Iterable[nn.Parameter] = ()) -> nn.Module:
    """Copy a module, with zeros that take no memory as parameters, under all their names.

    What it keeps outside of its parts of its own and of the ``shared`` parameters stays itself.
    """
    # The copy shares the parameters' memory until they are dropped.
    found = copied(module, {id(each): each for each in (*module.parameters(), *shared)})
    zeros: dict[int, nn.Parameter] = {}
    for name, parameter in list(found.named_parameters(remove_duplicate=False)):
        if id(parameter) not in zeros:
            zero = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            zeros[id(parameter)] = nn.Parameter(zero, requires_grad=False)
        set_parameter(found, name, zeros[id(parameter)])
    return found


def move_skeleton(module: nn.Module, *, device: torch.device | str, dtype: torch.dtype) -> None:
    """Move buffers to a device, and make its parameters zeros of one type there.

    ``nn.Module.to`` would give each zero its memory.
    """
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        zero = torch.zeros((), dtype=kind, device=device).expand(parameter.shape)
        set_parameter(module, name, nn.Parameter(zero, requires_grad=False))


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace a parameter, by its name in the module."""
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    assert attribute in owner._parameters, f"the module has no parameter {name}"
    setattr(owner, attribute, parameter)
