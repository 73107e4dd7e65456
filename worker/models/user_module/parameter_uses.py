"""Records which layers use each parameter; refuses code that uses what ranks train copies of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from simulator.documents.problems import InputError, Problem


class ParameterUses(TorchFunctionMode):
    """Records in which layers each of some parameters is used; ``names`` are by their ``id``."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.layer = 0
        self.layers_of: dict[str, set[int]] = {}

    def __torch_function__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # A parameter's type or shape is read without the parameter being used.
        name = getattr(func, "__name__", "")
        is_like_it = name.startswith("new_") or name.endswith("_like")
        if not is_like_it and any(isinstance(each, (Tensor, float)) for each in tree_leaves(out)):
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, nn.Parameter) and id(each) in self._names:
                    self.layers_of.setdefault(self._names[id(each)], set()).add(self.layer)
        return out


@contextmanager
def refused_uses(place: str, names: Mapping[int, str], cure: str) -> Iterator[None]:
    """Refuse code that uses parameters of the script, where ranks train copies of them."""
    uses = ParameterUses(names)
    with uses:
        yield
    if uses.layers_of:
        what = f"uses {next(iter(uses.layers_of))} of the script's model"
        why = "which keeps its initial value: ranks train copies"
        raise InputError(Problem(place, f"{what}, {why}", cure))
