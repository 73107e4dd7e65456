"""Writes a script's module with its trained weights, as the module's library would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_model
from torch import Tensor, nn

from worker.models.user_module.module_cut import ModuleCut
from worker.models.user_module.module_skeleton import set_parameter
from worker.script.hf_model import copy_companions


def fill(module: nn.Module, cut: ModuleCut, value_of: Callable[[str], Tensor]) -> None:
    """Give a skeleton its weights, each under all its names."""
    for name in cut.layer_of:
        value = value_of(name)
        if value.untyped_storage().nbytes() > value.nbytes:
            value = value.clone()  # A piece of a larger file, which safetensors refuses.
        parameter = nn.Parameter(value, requires_grad=False)
        for each in (name, *(alias for alias, first in cut.alias_of.items() if first == name)):
            set_parameter(module, each, parameter)


def save_filled(module: nn.Module, folder: Path, source: Path | None) -> None:
    """Save by ``save_pretrained``, with the tokenizer of ``source``, or as safetensors."""
    save: Any = getattr(module, "save_pretrained", None)
    if save is None:
        save_model(module, str(folder / "model.safetensors"))
        return
    save(folder)
    if source is not None:
        copy_companions(source, folder)
