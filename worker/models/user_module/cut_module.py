"""A user's module after the cut: a rank computes only the layers that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from worker.models.user_module.module_cut import (
    BlockRest,
    Call,
    ModuleCut,
    hidden_of,
    repack,
    replaced_forwards,
    split_hidden,
)
from worker.models.user_module.module_skeleton import set_parameter


def to_meta(value: Any) -> Any:
    """Return a tensor's twin on the meta device; other values unchanged."""
    return value.detach().to("meta") if isinstance(value, Tensor) else value


class _NoCheckpoint:
    """Takes the place of torch's reentrant checkpoint."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)


def _no_checkpoint(*_: Any, **__: Any) -> Iterator[None]:
    """Take the place of torch's non-reentrant checkpoint, a generator around the call."""
    yield


def ignore_checkpoints() -> None:
    """Let ``torch.utils.checkpoint`` call its function at once, from now on in this process.

    What is recomputed is decided by the plan, for a block as a whole.
    """
    replaced: Any = torch.utils.checkpoint
    replaced.CheckpointFunction = _NoCheckpoint
    replaced._checkpoint_without_reentrant_generator = _no_checkpoint


def keep_padding() -> None:
    """Let torch's own encoder evaluate by the code of training, from now on in this process.

    Its fast path takes padding out of the hidden state, whose shape a next stage cannot know.
    """
    torch.backends.mha.set_fastpath_enabled(False)


class _StopForwardError(BaseException):
    """Ends a forward pass early, through any ``except Exception`` of the module's code."""


@dataclass(slots=True)
class BlockArguments:
    """What the module's code passes to its blocks beside the hidden state, for one batch."""

    rest: list[BlockRest]
    hidden_shape: torch.Size


class CutModule:
    """A module of which one rank computes some layers."""

    def __init__(self, module: nn.Module, cut: ModuleCut, call: Call) -> None:
        ignore_checkpoints()
        keep_padding()
        self.module, self.cut, self._call = module, cut, call
        self._blocks = [module.get_submodule(path) for path in cut.blocks]
        self._computes = [block.forward for block in self._blocks]
        self._evaluated = [part for part in module.modules() if not part.training]
        self._step: Callable[[int, tuple[Any, ...], dict[str, Any]], Any] | None = None
        for index, block in enumerate(self._blocks):
            block.__dict__["forward"] = self._dispatcher(index)

    def set_training(self, on: bool) -> None:
        """Switch between training, with dropout, and evaluation, in which some parts always are."""
        self.module.train(on)
        for part in self._evaluated:
            part.training = False

    def arguments(self, batch: Any) -> BlockArguments:
        """Run the module's code without its blocks, and return what it passes to them."""
        found = BlockArguments([], torch.Size())

        def step(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, rest = split_hidden(self.cut.blocks[index], args, kwargs)
            found.rest.append(rest)
            if index == 0:
                found.hidden_shape = hidden.shape
            if index + 1 == len(self._blocks):
                raise _StopForwardError
            return repack(self.cut.forms[index], hidden)

        with torch.no_grad():
            self._run(batch, step)
        return found

    def embed(self, batch: Any) -> Tensor:
        """Run everything before the first block."""
        found = []

        def step(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            found.append(split_hidden(self.cut.blocks[index], args, kwargs)[0])
            raise _StopForwardError

        self._run(batch, step)
        return found[0]

    def block(self, index: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
        """Run one block, counted from 0."""
        args, kwargs, name = arguments.rest[index]
        if name is None:
            out = self._computes[index](hidden, *args, **kwargs)
        else:
            out = self._computes[index](*args, **{name: hidden, **kwargs})
        return hidden_of(out)

    def head(
        self,
        hidden: Tensor,
        batch: Any,
        *,
        at_last_block: Callable[[], None] = lambda: None,
        call: Call | None = None,
    ) -> Any:
        """Run everything behind the last block; return what the module returns.

        ``at_last_block`` is called when the code before the blocks has run once more. ``call``
        calls the module in another way than in training.
        """

        def step(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index + 1 < len(self._blocks):
                return repack(self.cut.forms[index], args[0] if args else kwargs["hidden_states"])
            at_last_block()
            return repack(self.cut.forms[index], hidden)

        return self._run(batch, step, call)

    def device_to_trace(self, index: int, arguments: BlockArguments, dtype: torch.dtype) -> str:
        """Return the meta device, or the CPU for a block whose code needs real numbers.

        The shapes in a mixture of experts, for example, depend on what the router chooses.
        """
        hidden = torch.empty(arguments.hidden_shape, device="meta", dtype=dtype)
        try:
            self.traced_block(index, arguments)(hidden)
        except RuntimeError:
            return "cpu"
        return "meta"

    def traced_block(
        self,
        index: int,
        arguments: BlockArguments,
        shape_of: Callable[[str], Sequence[int]] | None = None,
        *,
        device: str = "meta",
        is_trained: Callable[[str], bool] = lambda _: False,
    ) -> Callable[[Tensor], Tensor]:
        """Return a block's computation with empty parameters, whose shapes ``shape_of`` changes.

        On the CPU they are zeros, which take memory. Trained ones want a gradient.
        """
        block, path = self._blocks[index], self.cut.blocks[index]
        rest = arguments.rest[index]
        args, kwargs, name = tree_map(to_meta, rest) if device == "meta" else rest
        state = {key: value.detach().to(device) for key, value in block.named_buffers()}
        for key, value in block.named_parameters():
            shape = value.shape if shape_of is None else tuple(shape_of(f"{path}.{key}"))
            # A stack of matrices without strides is refused by fused kernels.
            state[key] = torch.zeros(shape, dtype=value.dtype, device=device)
            state[key].requires_grad_(is_trained(f"{path}.{key}"))

        def compute(hidden: Tensor) -> Tensor:
            given = (hidden, *args) if name is None else args
            named = kwargs if name is None else {name: hidden, **kwargs}
            with replaced_forwards([(block, self._computes[index])]):
                return hidden_of(functional_call(block, state, given, named))

        return compute

    @contextmanager
    def head_on_meta(self, is_trained: Callable[[str], bool]) -> Iterator[None]:
        """Move the parameters of the last layer to the meta device for a while."""
        last = self.cut.layers - 1
        names = [name for name, layer in self.cut.layer_of.items() if layer == last]
        names += [alias for alias, first in self.cut.alias_of.items() if alias != first]
        before = {name: self.module.get_parameter(name) for name in names}
        for name, parameter in before.items():
            on_meta = parameter.detach().to("meta")
            set_parameter(self.module, name, nn.Parameter(on_meta, requires_grad=is_trained(name)))
        try:
            yield
        finally:
            for name, parameter in before.items():
                set_parameter(self.module, name, parameter)

    def _run(
        self,
        batch: Any,
        step: Callable[[int, tuple[Any, ...], dict[str, Any]], Any],
        call: Call | None = None,
    ) -> Any:
        self._step = step
        try:
            return (call or self._call)(self.module, batch)
        except _StopForwardError:
            return None
        finally:
            self._step = None

    def _dispatcher(self, index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            assert self._step is not None, "blocks are called through the module"
            return self._step(index, args, kwargs)

        return forward
