"""A module whose parameters take no memory, for code that only needs their shapes."""

from __future__ import annotations

import torch
from torch import nn


def drop_values(module: nn.Module) -> None:
    """Replace all parameters by zeros that take no memory, under all their names."""
    zeros: dict[int, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) not in zeros:
            zero = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            zeros[id(parameter)] = nn.Parameter(zero, requires_grad=False)
        set_parameter(module, name, zeros[id(parameter)])


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
