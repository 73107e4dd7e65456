"""A module whose parameters take no memory, for code that only needs their shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn


def make_skeleton(make: Callable[[], nn.Module]) -> nn.Module:
    """Call a function that makes a module, without memory for its parameters.

    Buffers are real: rotary frequencies and masks are computed from a config, and small.
    """
    with _parameters_on_meta():
        module = make()
    drop_values(module)
    return module


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


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter
    moved: dict[int, tuple[Tensor, nn.Parameter]] = {}

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            # A parameter that is registered twice stays one parameter.
            found = moved.get(id(param))
            if found is None:
                new = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                found = moved[id(param)] = (param, new)
            param = found[1]
        register(self, name, param)

    with mock.patch.object(nn.Module, "register_parameter", register_on_meta):
        yield
