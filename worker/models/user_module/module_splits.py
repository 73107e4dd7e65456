"""Which parts of a user's blocks tensor parallelism may split, as their code declares it.

A block's class may declare ``splits`` (``worker.layout.split_spec``). Models of transformers have a
tensor-parallel plan, from patterns of names to styles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any, Literal

import torch
from torch import Tensor, nn

from worker.layout.split_spec import splits_of
from worker.models.user_module.cut_module import BlockArguments, CutModule
from worker.models.user_module.module_cut import DrawRecorder, ModuleCut, kinds_of, sources_of

ParameterSplit = Literal["columns", "rows", "partial", "adapter columns", "adapter rows"]
"""``columns`` and ``rows`` are those of ``worker.layout.split_spec``. An adapter's have small
inputs and outputs of its own. ``partial``: every rank has all of a part, and computes a part of
its gradient."""

_STYLES: Mapping[str, ParameterSplit] = {
    "colwise": "columns",
    "rowwise": "rows",
    "replicated_with_grad_allreduce": "partial",
}


@dataclass(frozen=True, slots=True)
class ModuleSplits:
    """The parts of blocks, and single parameters, that may be split, by name in the module."""

    kinds: Mapping[str, ParameterSplit]
    max_tp: int
    why_not_more: str
    """Why the largest TP degree is not larger."""
    experts: str = ""
    """A mixture of experts, which every rank computes in full."""

    def of_parameter(self, name: str) -> tuple[int | None, int]:
        """Return the dimension that is split, and into how many pieces at most.

        A parameter that every rank holds in full, but of whose gradient each computes a part, has
        a dimension and one piece.
        """
        path, _, kind = name.rpartition(".")
        match self.kinds.get(name, self.kinds.get(path)):
            case "columns" | "adapter columns":
                return 0, self.max_tp
            case "rows" | "adapter rows" if kind == "weight":
                return 1, self.max_tp
            case "partial":
                return 0, 1
            case _:
                return None, 1

    def rank_shape_in(self, module: CutModule, tp: int) -> Callable[[str], Sequence[int]]:
        """Return a function from a parameter's name to the shape that one of ``tp`` ranks holds."""

        def shape_of(name: str) -> Sequence[int]:
            shape = list(module.module.get_parameter(name).shape)
            dim, ways = self.of_parameter(name)
            if dim is not None and ways > 1:
                shape[dim] //= tp
            return shape

        return shape_of


def find_splits(module: CutModule, batch: Any, *, most: int) -> ModuleSplits:
    """Find what may be split, and the largest power of two as TP degree that works."""
    kinds, why = declared_splits(module.module, module.cut)
    if not kinds or most < 2:
        return ModuleSplits({}, 1, why)
    arguments = module.arguments(batch)
    for name in list(_find_between(module, kinds, arguments)):
        if module.module.get_parameter(name).dim() == 0:
            return ModuleSplits({}, 1, f"{name} is a single number, used between split parts")
        kinds = {**kinds, name: "partial"}
    tp = 1 << (most.bit_length() - 1)
    while tp > 1:
        found = ModuleSplits(kinds, tp, "", _experts(module))
        why = _why_not(module, found, arguments)
        if not why:
            return found
        tp //= 2
    return ModuleSplits({}, 1, why)


def _find_between(
    module: CutModule, kinds: Mapping[str, ParameterSplit], arguments: BlockArguments
) -> Iterator[str]:
    """Yield the parameters that blocks use between split columns and rows, in full.

    Each rank computes a part of their gradients, whether their plan says it or not.
    """
    like = kinds_of(module.module, module.cut.blocks)
    found: dict[int, list[str]] = {}
    for index, path in enumerate(module.cut.blocks):
        if like[index] == index:
            found[index] = _find_between_in(module, index, kinds, arguments)
        yield from (f"{path}.{name}" for name in found[like[index]])


def _find_between_in(
    module: CutModule, index: int, kinds: Mapping[str, ParameterSplit], arguments: BlockArguments
) -> list[str]:
    path = module.cut.blocks[index]
    block = module.module.get_submodule(path)
    given: dict[str, Tensor] = {}
    entering: list[Tensor] = []

    def begin(part: nn.Module, _: Any) -> None:
        given.update(part.named_parameters())

    def enter(_: Any, args: tuple[Any, ...]) -> None:
        entering.append(args[0])

    def leave(_: Any, __: Any, out: Tensor) -> Tensor:
        return out.detach().requires_grad_()

    hooks = [block.register_forward_pre_hook(begin)]
    for name, part in block.named_modules():
        kind = kinds.get(f"{path}.{name}", "")
        if kind.endswith("rows"):
            hooks.append(part.register_forward_pre_hook(enter))
        elif kind.endswith("columns"):
            hooks.append(part.register_forward_hook(leave))

    def is_trained(name: str) -> bool:
        return module.module.get_parameter(name).is_floating_point()

    dtype = next(block.parameters()).dtype
    device = module.device_to_trace(index, arguments, dtype)
    hidden = torch.zeros(arguments.hidden_shape, device=device, dtype=dtype)
    try:
        with torch.enable_grad():
            module.traced_block(index, arguments, device=device, is_trained=is_trained)(hidden)
    finally:
        for hook in hooks:
            hook.remove()
    reached = sources_of(entering)
    return [name for name, each in given.items() if id(each) in reached]


def _experts(module: CutModule) -> str:
    """Return the first mixture of experts; empty if there is none."""
    styles = _styles(module.module, module.cut)
    return next((name for name, style in styles if _keeps_experts(style)), "")


def _keeps_experts(style: str) -> bool:
    return style.startswith("moe_")


def _why_not(module: CutModule, splits: ModuleSplits, arguments: BlockArguments) -> str:
    """Return why blocks cannot be split so finely: their code fails with a rank's shapes."""
    tp, cut = splits.max_tp, module.cut
    kinds = kinds_of(module.module, cut.blocks)
    for index, path in enumerate(cut.blocks):
        if kinds[index] != index:
            continue
        block = module.module.get_submodule(path)
        for name, parameter in block.named_parameters():
            dim, ways = splits.of_parameter(f"{path}.{name}")
            if dim is not None and ways > 1 and parameter.shape[dim] % tp:
                size = parameter.shape[dim]
                return f"{path}.{name} has {size} rows or columns, not divisible by {tp}"
        device = module.device_to_trace(index, arguments, parameter.dtype)
        hidden = torch.zeros(arguments.hidden_shape, device=device, dtype=parameter.dtype)
        shape_of = splits.rank_shape_in(module, tp)
        whole, share = DrawRecorder(), DrawRecorder()
        try:
            with whole:
                module.traced_block(index, arguments, device=device)(hidden)
            with share:
                out = module.traced_block(index, arguments, shape_of, device=device)(hidden)
        except (RuntimeError, ValueError, IndexError) as error:
            reason = str(error).partition("\n")[0]
            return f"{path} does not compute with a share of its columns: {reason}"
        if whole.shapes != share.shapes:
            return f"{path} has dropout inside a part that would be split"
        if out.shape != hidden.shape:
            return f"{path} returns another shape with a share of its columns"
    return ""


def declared_splits(module: nn.Module, cut: ModuleCut) -> tuple[Mapping[str, ParameterSplit], str]:
    """Return the splittable parts of all blocks; empty with a reason if there are none."""
    found = dict(_read_classes(module, cut))
    for path, kind in found.items():
        if kind not in ("columns", "rows"):
            return {}, f"{path} is declared as {kind!r}; columns and rows are possible"
    if not found:
        found, unknown = _read_plan(module, cut)
        if unknown:
            return {}, f"its tensor-parallel plan says {unknown}, which is not supported"
    parts = dict(module.named_modules())
    found = dict(_take_adapters_apart(found, parts))
    for path, kind in found.items():
        part = parts.get(path)
        if part is None:
            return {}, f"{path} is declared, and the block has no such part"
        if kind != "partial" and type(part) is not nn.Linear:
            return {}, f"{path} is a {_name_of(part)}, not a plain nn.Linear"
    if not any(kind == "columns" for kind in found.values()):
        return {}, f"{type(module).__name__} declares no tensor-parallel plan"
    return found, ""


def _take_adapters_apart(
    found: Mapping[str, ParameterSplit], parts: Mapping[str, nn.Module]
) -> Iterator[tuple[str, ParameterSplit]]:
    """Yield all parts, with peft's LoRA layers taken apart: their matrices follow what they adapt.

    B has the outputs of the adapted layer, and A its inputs: one is split, the other every rank has
    in full. Between them is a small tensor, which the ranks sum, or its gradient.
    """
    for path, kind in found.items():
        part = parts.get(path)
        if part is None or kind not in ("columns", "rows") or not _is_plain_lora(part):
            yield path, kind
            continue
        yield f"{path}.base_layer", kind
        matrix: ParameterSplit = "adapter columns" if kind == "columns" else "adapter rows"
        split = "lora_B" if kind == "columns" else "lora_A"
        for name in parts[f"{path}.{split}"]._modules:
            yield f"{path}.{split}.{name}", matrix


def _is_plain_lora(part: nn.Module) -> bool:
    """Return whether a part adds the product of two matrices to a linear layer, and no more."""
    if _name_of(part) != "peft.tuners.lora.layer.Linear":
        return False
    # Versions of peft without this attribute keep variants such as DoRA elsewhere.
    return getattr(part, "lora_variant", None) == {} and not getattr(part, "merged", False)


def _name_of(part: nn.Module) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"


def _read_classes(module: nn.Module, cut: ModuleCut) -> Iterator[tuple[str, Any]]:
    for path in cut.blocks:
        for name, kind in splits_of(module.get_submodule(path)).items():
            yield f"{path}.{name}", kind


def _read_plan(module: nn.Module, cut: ModuleCut) -> tuple[dict[str, ParameterSplit], str]:
    """Read the plan of transformers; experts stay whole."""
    found: dict[str, ParameterSplit] = {}
    for name, style in _styles(module, cut):
        if style in _STYLES:
            found[name] = _STYLES[style]
        elif not _keeps_experts(style):
            return {}, f"{name}: {style}"
    return found, ""


def _styles(module: nn.Module, cut: ModuleCut) -> Iterator[tuple[str, str]]:
    """Return the style of each part of a block that the plan of transformers names.

    The plan is that of the outermost part that has one. Wrappers such as peft's answer for what
    they wrap, whose names begin elsewhere, so they are not asked.
    """
    parts = module.named_modules()
    planned = ((name, getattr_static(part, "_tp_plan", None)) for name, part in parts)
    prefix, plan = next(((name, plan) for name, plan in planned if plan), ("", {}))
    patterns = [
        (re.compile(re.escape(f"{prefix}.{key}".lstrip(".")).replace(r"\*", r"\d+")), style)
        for key, style in plan.items()
    ]
    for path in cut.blocks:
        for name, _ in module.get_submodule(path).named_modules(prefix=path):
            style = next((style for pattern, style in patterns if pattern.fullmatch(name)), "")
            if style:
                yield name, style
