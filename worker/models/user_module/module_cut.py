"""Cuts a user's module into layers at its repeated blocks, without knowing its code.

A module is cut by running its own forward code with parts of it replaced. Layer 0 is everything
before the first block, the last layer everything behind the last block. A rank that holds other
layers runs the same code: blocks that it does not hold hand on their input, and parameters that it
does not hold are zeros that take no memory. So masks, positions and whatever else the code passes
to its blocks are computed on every rank by the code itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worker.data.batch_tree import leaves_of, map_tensors
from worker.models.random_numbers.keyed_random import draws_numbers
from worker.models.user_module.parameter_uses import ParameterUses

Call = Callable[[nn.Module, Any], Any]
"""Calls the module with a batch: ``lambda module, batch: module(**batch)``."""


class CutError(ValueError):
    """The module cannot be cut; the message names the block and the reason."""


@dataclass(frozen=True, slots=True)
class ModuleCut:
    """Where a module is cut, and which layer each parameter belongs to."""

    blocks: tuple[str, ...]
    """The blocks' names, in the order in which they are called."""
    layer_of: Mapping[str, int]
    """The layer of each parameter, by its name in the module."""
    alias_of: Mapping[str, str]
    """Second names of tied parameters, and the first ones."""
    unused: frozenset[str]
    """Parameters outside of blocks on which no result depends; they are in ``layer_of`` as well.

    What a block uses may depend on numbers or on its place, so none of its own is among them.
    """
    forms: tuple[tuple[Any, ...] | None, ...]
    """What each block returns beside its hidden state, with ``NotHandedOn`` for other tensors;
    ``None``: it returns a tensor."""
    without_gradients: int = 0
    """The last layer that the module's code calls without gradients; 0: none."""

    @property
    def layers(self) -> int:
        return len(self.blocks) + 2

    def layer_name(self, index: int) -> str:
        if index in (0, self.layers - 1):
            return "embedding" if index == 0 else "head"
        return self.blocks[index - 1]

    def is_shared_with_head(self, alias: str) -> bool:
        """Return whether a tied parameter is of layer 0, and used by the head too."""
        in_blocks = any(alias.startswith(f"{path}.") for path in self.blocks)
        return self.layer_of[self.alias_of[alias]] == 0 and not in_blocks

    def local_name(self, parameter: str) -> str:
        """Return the name of a parameter in its layer: a block's own, or the module's."""
        index = self.layer_of[parameter]
        inner = 0 < index < self.layers - 1
        return parameter.removeprefix(f"{self.blocks[index - 1]}.") if inner else parameter

    def full_name(self, index: int, name: str) -> str:
        """Return the module's name of a layer's parameter."""
        return f"{self.blocks[index - 1]}.{name}" if 0 < index < self.layers - 1 else name


def find_cut(module: nn.Module, call: Call, batch: Any) -> ModuleCut:
    """Find where to cut a skeleton, with a pass over a small batch for each list of blocks.

    The pass computes one of several equal blocks; the others hand on their input. Gradients are
    followed, so that a second path from a parameter to a block or to the result is found.
    """
    found = []
    for blocks in _candidates(module):
        try:
            return _try_cut(module, blocks, call, batch)
        except CutError as error:
            found.append(f"{blocks[0]} to {blocks[-1]}: {error}")
        except Exception as error:
            reason = str(error).partition("\n")[0]
            found.append(f"{blocks[0]} to {blocks[-1]}: {type(error).__name__}: {reason}")
    if not found:
        what = "has no list of blocks (nn.ModuleList or nn.Sequential)"
        raise CutError(f"{type(module).__name__} {what}")
    raise CutError("; ".join(found[:3]))


def _candidates(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """Return lists of blocks, those with the most parameters in blocks of one class first."""
    lists = []
    for name, part in module.named_modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) > 1:
            paths = tuple(f"{name}.{key}".lstrip(".") for key, _ in part.named_children())
            paths = paths[1:] if isinstance(part[0], nn.Embedding) else paths
            sizes = [sum(p.numel() for p in each.parameters()) for each in part]
            often = Counter(map(type, part))
            repeated = sum(n for n, each in zip(sizes, part, strict=True) if often[type(each)] > 1)
            lists.append((repeated, sum(sizes), paths))
    # A list inside a block of another list has fewer parameters than that one.
    lists.sort(key=lambda each: each[:2], reverse=True)
    return (paths for _, size, paths in lists if size > 0)


def kinds_of(module: nn.Module, blocks: Sequence[str]) -> list[int]:
    """Return for each block the index of the first one like it: of equal code, sizes and settings.

    Blocks without parameters may change shapes, so each is like itself alone.
    """
    first: dict[Any, int] = {}
    found = []
    for index, path in enumerate(blocks):
        block = module.get_submodule(path)
        sizes = tuple(p.shape for p in block.parameters())
        modes = tuple(part.training for part in block.modules())
        kind = (type(block), repr(block), sizes, modes) if sizes else index
        found.append(first.setdefault(kind, index))
    return found


def _try_cut(module: nn.Module, blocks: tuple[str, ...], call: Call, batch: Any) -> ModuleCut:
    names = {id(p): name for name, p in reversed(list(_all_parameters(module)))}
    uses = ParameterUses(names)
    watch = _Watch(blocks, uses)
    kinds = kinds_of(module, blocks)
    parts = []
    for index, path in enumerate(blocks):
        block = module.get_submodule(path)
        is_first = kinds[index] == index
        parts.append(
            (block, watch.watched(index, kinds[index], block.forward if is_first else None))
        )
    with _followed(module), _with_memory(parts), replaced_forwards(parts):
        with uses:
            out = call(module, batch)
        if watch.called < len(blocks):
            raise CutError(f"{blocks[watch.called]} is not called")
        cut = _assign(module, blocks, uses, names, tuple(watch.forms))
        unused = cut.unused | _find_without_effect(module, cut, watch.first, out)
        cut = replace(cut, unused=unused, without_gradients=watch.without_gradients)
        _refuse_second_paths(module, cut, watch, out)
    return cut


@contextmanager
def _with_memory(parts: Sequence[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Give stacks of matrices memory for a while: fused kernels refuse zeros without strides."""
    stacks = [p for block, _ in parts for p in block.parameters() if p.dim() > 2]
    before = [stack.data for stack in stacks]
    try:
        for stack in stacks:
            stack.data = stack.data.contiguous()
        yield
    finally:
        for stack, data in zip(stacks, before, strict=True):
            stack.data = data


@contextmanager
def _followed(module: nn.Module) -> Iterator[None]:
    """Let autograd follow all parameters of floats for a while."""
    before = {each: each.requires_grad for _, each in _all_parameters(module)}
    for each in before:
        each.requires_grad_(each.is_floating_point())
    try:
        with torch.enable_grad():
            yield
    finally:
        for each, wanted in before.items():
            each.requires_grad_(wanted)


def _refuse_second_paths(module: nn.Module, cut: ModuleCut, watch: _Watch, result: Any) -> None:
    """Refuse a block or a result that depends on another layer beside the hidden state."""
    tied = set(cut.alias_of.values())
    followed: dict[str, tuple[int, Tensor]] = {
        name: (layer, module.get_parameter(name))
        for name, layer in cut.layer_of.items()
        if name not in tied and module.get_parameter(name).requires_grad
    }
    inputs = {f"the input of {cut.blocks[i]}": (i + 1, x) for i, x in watch.inputs.items()}

    def path_to(out: Any, own: int) -> str | None:
        """Name what a value was computed from that is not of its own layer."""
        sources = {
            name: source for name, (layer, source) in (followed | inputs).items() if layer != own
        }
        tensors = [e for e in leaves_of(out) if isinstance(e, Tensor) and e.requires_grad]
        if not tensors or not sources:
            return None
        total = torch.stack([each.double().sum() for each in tensors]).sum()
        gradients = torch.autograd.grad(total, list(sources.values()), allow_unused=True)
        found = zip(sources, gradients, strict=True)
        return next((name for name, gradient in found if gradient is not None), None)

    for index, out in watch.outputs.items():
        name = path_to(out, index + 1)
        if name is not None:
            what = f"{cut.blocks[index]} uses what was computed from {name}"
            raise CutError(f"{what} beside its hidden state")
    name = path_to(result, cut.layers - 1)
    if name is not None:
        raise CutError(f"code behind {cut.blocks[-1]} uses what was computed from {name}")


def _find_without_effect(
    module: nn.Module, cut: ModuleCut, hidden: Tensor, result: Any
) -> set[str]:
    """Return the parameters outside of blocks that code has used, but no result depends on.

    As by torch they have no gradient: ``hidden`` is what the first block gets.
    """
    found: set[str] = set()
    tied = set(cut.alias_of.values())
    for layer, out in ((0, hidden), (cut.layers - 1, result)):
        tensors = [e for e in leaves_of(out) if isinstance(e, Tensor) and e.requires_grad]
        if not tensors:
            continue  # Nothing here is differentiated, which is judged elsewhere.
        reached = sources_of(tensors)
        names = (name for name, index in cut.layer_of.items() if index == layer)
        for name in names:
            parameter = module.get_parameter(name)
            if name not in tied and parameter.requires_grad and id(parameter) not in reached:
                found.add(name)
    return found


def sources_of(tensors: Sequence[Tensor]) -> set[int]:
    """Return the ``id`` of each tensor that some were computed from, as autograd remembers it."""
    found = {id(each) for each in tensors}
    known: set[Any] = set()
    left: list[Any] = [each.grad_fn for each in tensors]
    while left:
        node = left.pop()
        if node is None or node in known:
            continue
        known.add(node)
        found.add(id(getattr(node, "variable", None)))
        left += [each for each, _ in node.next_functions]
    return found


class NotHandedOn:
    """Stands for a second tensor that a block returns: other stages do not get it.

    Code may pass it on, as with the scores of attention, and is refused when it computes with it.
    """

    def __init__(self, block: str) -> None:
        self._block = block

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python asks for what an object may do.
        raise CutError(f"code uses a second tensor that {self._block} returns")

    @classmethod
    def __torch_function__(cls, _: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        block = next(each._block for each in given if isinstance(each, cls))
        raise CutError(f"code uses a second tensor that {block} returns")


class DrawRecorder(TorchDispatchMode):
    """Records the shapes of random numbers that are drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if draws_numbers(func, args, kwargs or {}):
            self.shapes += [each.shape for each in tree_leaves(out) if isinstance(each, Tensor)]
        return out


class _Watch:
    """Follows the hidden state from block to block."""

    def __init__(self, blocks: Sequence[str], uses: ParameterUses) -> None:
        self._blocks, self._uses = blocks, uses
        self.called = self.without_gradients = 0
        self._autocast = _autocast()
        self.forms: list[tuple[Any, ...] | None] = []
        self.first = torch.empty(0)
        """What the first block gets."""
        self._before: Tensor | None = None
        self.inputs: dict[int, Tensor] = {}
        """The hidden state of each block that was computed, from which it was computed alone."""
        self.outputs: dict[int, Tensor] = {}

    def watched(
        self, index: int, like: int, compute: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        """Return a forward method of a block; without ``compute`` it hands on its input."""
        name = self._blocks[index]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if index != self.called:
                again = "again" if index < self.called else f"before {self._blocks[self.called]}"
                raise CutError(f"{name} is called {again}")
            hidden, rest = split_hidden(name, args, kwargs)
            if index == 0:
                self.first = hidden
            if self._before is not None and hidden is not self._before:
                between = f"between {self._blocks[index - 1]} and {name}"
                raise CutError(f"code {between} changes the hidden state")
            if _autocast() != self._autocast:
                raise CutError(f"{name} is called under torch.autocast: give precision= instead")
            if not torch.is_grad_enabled():
                self.without_gradients = index + 1
            self._uses.layer = index + 1
            if compute is None:
                out = repack(self.forms[like], hidden)
            else:
                out = self._compute(index, compute, hidden, rest)
            self.forms.append(form_of(name, out))
            if compute is not None:
                self.outputs[index] = hidden_of(out)
            is_last = index + 1 == len(self._blocks)
            self._uses.layer = index + 2 if is_last else -1
            self.called += 1
            self._before = hidden_of(out)
            if self._before.shape[:1] != hidden.shape[:1]:
                raise CutError(f"{name} changes the number of samples")
            # Detached, as a block's input is: a gradient from the result to another layer then
            # shows a path around the blocks, which is refused.
            return repack(self.forms[index], self._before.detach() if is_last else self._before)

        return forward

    def _compute(
        self, index: int, compute: Callable[..., Any], hidden: Tensor, rest: BlockRest
    ) -> Any:
        self.inputs[index] = hidden.detach().requires_grad_()
        own = self.inputs[index].clone()
        args, kwargs, key = rest
        version = own._version
        out = compute(own, *args, **kwargs) if key is None else compute(**{key: own, **kwargs})
        if own._version != version:
            cure = "let it make a new one (x = x + ..., not x += ...)"
            raise CutError(f"{self._blocks[index]} writes into its input: {cure}")
        return out


def _autocast() -> list[bool]:
    return [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]


BlockRest = tuple[tuple[Any, ...], dict[str, Any], str | None]
"""A block's arguments beside its hidden state, and the name of that, if it is passed by name."""


def split_hidden(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, BlockRest]:
    """Separate a block's hidden state from its other arguments: the first argument."""
    rest: BlockRest
    if args:
        hidden, rest = args[0], (args[1:], dict(kwargs), None)
    elif "hidden_states" in kwargs:
        others = {key: value for key, value in kwargs.items() if key != "hidden_states"}
        hidden, rest = kwargs["hidden_states"], ((), others, "hidden_states")
    else:
        raise CutError(f"{name} has no hidden state as its first argument")
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
        raise CutError(f"the first argument of {name} is not a tensor of floats")
    for each in leaves_of(rest):
        if isinstance(each, NotHandedOn):
            raise CutError(f"{name} takes a second tensor that the block before it returns")
        if isinstance(each, Tensor) and each.requires_grad:
            raise CutError(f"{name} takes a second tensor that is trained")
    return hidden, rest


def hidden_of(out: Any) -> Tensor:
    """Return the hidden state of what a block returns."""
    first = out[0] if isinstance(out, tuple) else out
    assert isinstance(first, Tensor), "form_of has checked it"
    return first


def form_of(name: str, out: Any) -> tuple[Any, ...] | None:
    """Return what a block returns beside its hidden state; ``None`` if it returns a tensor."""
    if isinstance(out, Tensor):
        return None
    if not isinstance(out, tuple) or not out or not isinstance(out[0], Tensor):
        raise CutError(f"{name} returns {type(out).__name__}, not a tensor or a tuple of it")
    absent: Any = NotHandedOn(name)
    return tuple(map_tensors(lambda _: absent, each) for each in out[1:])


def repack(form: tuple[Any, ...] | None, hidden: Tensor) -> Any:
    """Return a hidden state as a block would: alone, or with what it returns beside it."""
    return hidden if form is None else (hidden, *form)


def _assign(
    module: nn.Module,
    blocks: tuple[str, ...],
    uses: ParameterUses,
    names: Mapping[int, str],
    forms: tuple[tuple[Any, ...] | None, ...],
) -> ModuleCut:
    """Assign a block's parameters to the block, and others to where they are used."""
    last = len(blocks) + 1
    inside = {}
    for index, path in enumerate(blocks):
        for name, _ in module.get_submodule(path).named_parameters(remove_duplicate=False):
            inside[f"{path}.{name}"] = index + 1
    layer_of, alias_of, unused, both_ends = {}, {}, set(), []
    for name, parameter in _all_parameters(module):
        first = names[id(parameter)]
        used = uses.layers_of.get(first, set())
        if name != first:
            if inside.get(name) != inside.get(first):
                raise CutError(f"{name} and {first} are one parameter of several blocks")
            alias_of[name] = first
        elif name in inside:
            if used - {inside[name]}:
                raise CutError(f"{name} is used outside of its block")
            layer_of[name] = inside[name]
        elif used - {0, last}:
            where = "between blocks" if -1 in used else f"in {blocks[min(used - {0}) - 1]}"
            raise CutError(f"{name} is used {where}")
        else:
            layer_of[name] = min(used, default=0)
            unused |= set() if used else {name}
            if used == {0, last}:
                both_ends.append(name)
    tied = set(alias_of.values())
    # Used at both ends without a second name: it is tied under its own.
    alias_of |= {name: name for name in both_ends if name not in tied}
    return ModuleCut(blocks, layer_of, alias_of, frozenset(unused), forms)


def _all_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)


@contextmanager
def replaced_forwards(parts: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Replace the forward methods of some modules for a while."""
    before = [dict(part.__dict__) for part, _ in parts]
    for part, forward in parts:
        part.__dict__["forward"] = forward
    try:
        yield
    finally:
        for (part, _), attributes in zip(parts, before, strict=True):
            del part.__dict__["forward"]
            if "forward" in attributes:
                part.__dict__["forward"] = attributes["forward"]
