"""Makes a script's module ready to be cut: what Sailor decides by itself is switched off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from simulator.documents.problems import InputError, Problem
from worker.models.user_module.module_cut import ModuleCut


def prepared(module: nn.Module) -> tuple[nn.Module, list[str], list[Any]]:
    """Return a module made ready, notes for its user, and the configurations that had a cache."""
    refuse_unknown_shapes(module)
    module, was_compiled = uncompiled(module.to("cpu"))
    out = "model: torch.compile is left out: ranks compute parts of it"
    notes = [out] if was_compiled else []
    caching = switch_caches_off(module)
    if leave_blocks_to_the_plan(module):
        what = "gradient checkpointing is left to recompute="
        notes.append(f'model: {what}, which recomputes nothing alone unless it is "full"')
    switch_to_training(module)
    refuse_batch_norm(module)
    return module, [*notes, *trained_in_evaluation(module)], caching


def uncompiled(module: nn.Module) -> tuple[nn.Module, bool]:
    """Return a module without the wrappers of ``torch.compile``, and whether there were some.

    Compiled code computes a module as a whole; ranks compute its parts.
    """
    had_some = module.__dict__.get("_compiled_call_impl") is not None
    if had_some:
        module._compiled_call_impl = None  # What ``module.compile()`` has left.
    if "_orig_mod" in module._modules:
        inner = module._modules["_orig_mod"]
        assert inner is not None, "it wraps a module"
        return uncompiled(inner)[0], True
    for name, part in module._modules.items():
        if part is not None:
            module._modules[name], has_some = uncompiled(part)
            had_some |= has_some
    return module, had_some


def switch_to_training(module: nn.Module) -> None:
    """Switch a module to training, but for parts that its script put into evaluation one by one."""
    kept = list(_find_evaluated(module)) if module.training else []
    module.train()
    for part in kept:
        part.training = False


def trained_in_evaluation(module: nn.Module) -> list[str]:
    """Tell of the outermost parts that are trained but stay in evaluation."""
    found: list[str] = []
    for path, part in module.named_modules():
        is_inner = any(path.startswith(f"{outer}.") for outer in found)
        if not part.training and not is_inner and any(p.requires_grad for p in part.parameters()):
            found.append(path)
    how = "is trained in evaluation (without dropout), as the script left it"
    return [f"model: {path} {how}" for path in found]


def refuse_unknown_shapes(module: nn.Module) -> None:
    """Refuse parameters without sizes or values, complex ones, and a longer input by prompts."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            what = f"{name} has no size before a first batch (a lazy module)"
            cure = "let the module compute one batch before it is handed over, or name the sizes"
            raise InputError(Problem("model", what, cure))
        if parameter.is_meta:
            what = f"{name} has no values (device meta)"
            cure = "make the model on the CPU; sailor.hf maps weights from files"
            raise InputError(Problem("model", what, cure))
        if parameter.is_complex():
            what = f"{name} is of complex numbers, of which ranks would keep the real part alone"
            cure = (
                "keep both parts in a real one, and use torch.view_as_complex in the forward pass"
            )
            raise InputError(Problem("model", what, cure))
    for path, part in module.named_modules():
        # A model of peft has configurations by name; other modules may use the word for more.
        adapters = getattr(part, "peft_config", None)
        for adapter in adapters.values() if isinstance(adapters, dict) else ():
            if getattr(adapter, "is_prompt_learning", False):
                what = f"{path or 'it'} learns prompts ({type(adapter).__name__}), which cannot"
                cure = "use an adapter of weights, such as LoraConfig"
                raise InputError(Problem("model", f"{what} be cut into stages", cure))
            if getattr(adapter, "peft_type", None) == "ADALORA":
                what = f"{path or 'it'} is adapted by AdaLoRA, whose own loss and choice of ranks"
                raise InputError(Problem("model", f"{what} would be left out", "use LoraConfig"))


def refuse_batch_norm(module: nn.Module) -> None:
    """Refuse batch norm in training, which computes with the statistics of a micro batch."""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None):
            what = f"{name} is a {type(part).__name__}, which mixes the samples of a micro batch"
            cure = "use GroupNorm or LayerNorm, or put it into eval() to keep its statistics"
            raise InputError(Problem("model", what, cure))


def refuse_without_gradients(cut: ModuleCut, trained: Iterable[str]) -> None:
    """Refuse to train what the module's code calls under ``torch.no_grad``: ranks call blocks."""
    for name in trained:
        if cut.layer_of.get(name, 0) <= cut.without_gradients > 0:
            what = f"calls {cut.layer_name(cut.without_gradients)} without gradients, and {name} "
            cure = "freeze it (requires_grad_(False)), leave it out of the optimizer, or let "
            raise InputError(
                Problem("model", f"{what}is to be trained", f"{cure}gradients be computed")
            )


def _find_evaluated(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts that are to stay in evaluation.

    A trained model of ``from_pretrained`` does not count: it is returned in evaluation.
    """
    if module.training:
        for part in module.children():
            yield from _find_evaluated(part)
    elif not (
        hasattr(type(module), "from_pretrained")
        and any(each.requires_grad for each in module.parameters())
    ):
        yield from (part for part in module.modules() if not part.training)


def switch_caches_off(module: nn.Module) -> list[Any]:
    """Switch off caches of keys and values; return the configurations that had one."""
    found = []
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        # A cache would remember the first pass of a recomputed block.
        if getattr(config, "use_cache", False):
            found.append(config)
            config.use_cache = False
    return found


def leave_blocks_to_the_plan(module: nn.Module) -> bool:
    """Let no part recompute itself, and no block write into its input; return whether one did."""
    part: Any
    recomputed = False
    for part in module.modules():
        # The plan decides what is recomputed.
        if getattr(part, "gradient_checkpointing", False):
            part.gradient_checkpointing = False
            recomputed = True
    for path in _chains(module):
        part = module.get_submodule(path)
        # The input may be kept for the backward pass.
        if getattr(part, "inplace", False):
            part.inplace = False
    return recomputed


def _chains(module: nn.Module) -> Iterator[str]:
    """Return the names of all items of lists and sequences of modules."""
    for name, part in module.named_modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)):
            yield from (f"{name}.{key}".lstrip(".") for key, _ in part.named_children())
