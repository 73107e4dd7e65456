"""Notices what callbacks change of a script's model and optimizer: ranks train copies of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from simulator.documents.problems import InputError, Problem

_CURE_OF_WEIGHTS = "change them before train(), in the forward pass, or in a copy of the model"
_CURE_OF_GRADIENTS = (
    "decide it before train(): what is trained later is a job of its own, from exported weights"
)
_CURE_OF_GROUPS = "give learning rates that change as scheduler=, and the rest before train()"


class ModelWatch(TorchFunctionMode):
    """Compares a model and its optimizer with what they were when it was made.

    As a context it also sees writes to a parameter's ``data``, which do not count as the
    parameter's own.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()
        self._module, self._optimizer = module, optimizer
        # Kept alive, so that no other tensor gets their addresses.
        self._tensors = _tensors_of(module)
        self._name_at = {address: n for n, t in self._tensors if (address := _address(t))}
        self._written: set[str] = set()
        self._before, self._numbers = self._state(), _numbers_of(module)

    def __torch_function__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tensors = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        named = ((self._name_at.get(_address(each)), each) for each in tensors)
        of_model = [(name, each, _version(each)) for name, each in named if name]
        out = func(*args, **(kwargs or {}))
        self._written |= {name for name, each, before in of_model if _version(each) != before}
        return out

    def refuse_changes(self) -> None:
        """Raise ``InputError`` that names what has changed, which training does not follow."""
        for cure, before, now in zip(_CURES, self._before, self._state(), strict=True):
            changed = [n for n in {**before, **now} if before.get(n) != now.get(n)]
            if changed:
                others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                what = f"change {changed[0]}{others}, which training does not follow"
                raise InputError(Problem("callbacks", f"{what}: ranks train copies", cure))

    def changed_number(self) -> str | None:
        """Return the name of a number that a part of the module has and that changed, if any."""
        now = _numbers_of(self._module)
        return next((n for n in now if n in self._numbers and now[n] != self._numbers[n]), None)

    def _state(self) -> tuple[Mapping[str, Any], ...]:
        tensors = _tensors_of(self._module)
        weights = {n: (id(t), _address(t), _version(t), n in self._written) for n, t in tensors}
        gradients = {f"requires_grad of {n}": t.requires_grad for n, t in tensors}
        return weights, gradients, _groups_of(self._optimizer)


_CURES = (_CURE_OF_WEIGHTS, _CURE_OF_GRADIENTS, _CURE_OF_GROUPS)


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _address(tensor: Tensor) -> int:
    """Return where a tensor's memory is; 0: it has none of its own."""
    with suppress(RuntimeError):  # Sparse tensors, for example.
        return tensor.untyped_storage().data_ptr()
    return 0


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written to; one made for inference does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _groups_of(optimizer: Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            facts = [id(each) for each in value] if key == "params" else repr(value)
            found[f"{key} of the optimizer's group {number}"] = facts
    return found


def _numbers_of(module: nn.Module) -> dict[str, str]:
    """Return the numbers that parts of a module have, as texts: NaN differs from itself."""
    return {
        f"{path}.{name}".lstrip("."): repr(value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if type(value) in (int, float)
    }
