"""The losses of scripts: what a user's function may return, and the loss without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from simulator.documents.problems import InputError, Problem
from worker.data.batch import NO_LABEL
from worker.data.batch_tree import leaves_of, parts_of, with_parts
from worker.models.user_module.parameter_uses import refused_uses

Loss = Callable[[Any, Any], Tensor | tuple[Tensor, int | Tensor]]

_CURE = "give loss=, a function of output and batch"
_RETURN = "return one value per sample, their mean, or a pair of a sum and a count"
_SEES = "let the model return what it needs: it sees output and batch only"
_TOKENS_TO_TELL = 8
_ONE_AHEAD = ("ForCausalLM", "ForConditionalGeneration")
_IN_PLACE = (
    "ForMaskedLM",
    "ForTokenClassification",
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)


def sum_and_count(found: Any, batch: Any, place: str = "loss") -> tuple[Tensor, int | Tensor]:
    """Read what a loss returned: a sum and a count, one value per sample, or their mean."""
    if isinstance(found, tuple):
        if [_dimensions(each) for each in found] != [0, 0]:
            what = "returns a tuple that is not a sum and a count"
            raise InputError(Problem(place, what, "return two scalars"))
        return found
    if not isinstance(found, Tensor):
        raise InputError(Problem(place, f"returns {_kind_of(found)}", _no_tensor(found)))
    if found.dim() == 0:
        samples = batch_size_of(batch)
        return found * samples, samples
    if found.shape != (batch_size_of(batch),):
        sizes = " x ".join(map(str, found.shape))
        what = f"returns {sizes} values for {batch_size_of(batch)} samples"
        raise InputError(Problem(place, what, _RETURN))
    return found.sum(), found.numel()


def _dimensions(value: Any) -> int | None:
    """Return the dimensions of a tensor, 0 of a number; ``None``: it is neither."""
    if isinstance(value, Tensor):
        return value.dim()
    return 0 if isinstance(value, Real) else None


def _kind_of(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _no_tensor(found: Any) -> str:
    if found is None:
        return f"{_RETURN}; a model that gets no labels computes no loss of its own"
    return f"{_RETURN}, as tensors"


def tried_at_first(place: str, function: Loss, trained: Mapping[int, str]) -> Loss:
    """Return a loss or metric whose first call is refused if it uses the model's parameters.

    Ranks train copies of them; ``trained`` are their names by ``id``.
    """
    untried = [True]

    def tried(output: Any, batch: Any) -> Any:
        if not untried:
            return function(output, batch)
        untried.clear()
        _refuse_criterion(place, function, batch)
        with refused_uses(place, trained, _SEES):
            return function(output, batch)

    return tried


def _refuse_criterion(place: str, function: Any, batch: Any) -> None:
    """Refuse a loss of torch itself, which takes labels, for a batch that is more than these."""
    while isinstance(function, partial):
        function = function.func
    about = function if hasattr(function, "__name__") else type(function)
    if isinstance(batch, Tensor) or not (about.__module__ or "").startswith("torch."):
        return
    taken = 'batch["labels"]' if isinstance(batch, Mapping) else "batch[1]"
    what = f"is torch's {about.__name__}, which takes labels, and gets the whole batch"
    cure = f"give a function that takes them out: lambda output, batch: ...(output, {taken})"
    raise InputError(Problem(place, what, cure))


def widened(output: Any) -> Any:
    """Return a model's output with 16-bit numbers in 32 bits, in which losses are summed."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
        # torch does not look into a dataclass that it does not know.
        parts = parts_of(value) if is_dataclass(value) else None
        if parts is None:
            return value
        return with_parts(value, {name: widened(part) for name, part in parts.items()})

    return tree_map(wide, output)


def batch_size_of(batch: Any) -> int:
    """Return the number of samples of a batch: the first dimension of its first tensor."""
    tensors = (each for each in leaves_of(batch) if isinstance(each, Tensor) and each.dim())
    return len(next(tensors, batch))


def labels_of(batch: Any) -> Any:
    """Return what a batch calls its labels, or a tuple's second entry; ``None``: it has none."""
    if isinstance(batch, Mapping):
        return batch.get("labels")
    if isinstance(batch, tuple) and not hasattr(batch, "labels"):
        return batch[1] if len(batch) > 1 else None
    return getattr(batch, "labels", None)


def label_count(batch: Any) -> int | None:
    """Return how many tokens of a batch have a label; ``None``: it has none for tokens."""
    labels = labels_of(batch)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() < 2:
        return None
    return int((labels != NO_LABEL).sum())


def default_loss(module: nn.Module, *, smoothing: float = 0.0) -> Loss:
    """Return the cross entropy of the batch's labels, as this kind of model is trained.

    A language model predicts one token ahead. A model of transformers says what it is; another one
    is a language model if it has a label per token.
    """
    kind = _kind(module)
    if kind is not None and kind not in (*_ONE_AHEAD, *_IN_PLACE):
        what = f"has no default for a model of the kind {kind}"
        raise InputError(Problem("loss", what, _CURE))

    unseen = [True]

    def loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            what = f"has no default for a model that returns a {type(output).__name__}"
            raise InputError(Problem("loss", what, _CURE))
        labels = labels_of(batch)
        if labels is None:
            raise InputError(Problem("loss", "has no default for a batch without labels", _CURE))
        if isinstance(batch, tuple) and len(batch) > 2 and not hasattr(batch, "labels"):
            what = f"has no default for samples of {len(batch)} entries: any may be the labels"
            cure = f"{_CURE}, and call=; or make samples mappings with labels"
            raise InputError(Problem("loss", what, cure))
        if labels.is_floating_point() or logits.shape[-1] == 1:
            what = "has no default for a regression or for labels that are not integers"
            raise InputError(Problem("loss", what, _CURE))
        per_token = logits.dim() == 3 and labels.dim() == 2
        if per_token and kind not in _IN_PLACE:
            if unseen and logits.device.type != "meta":
                unseen.clear()  # Looking at every batch would wait for the device.
                _refuse_moved(batch, labels)
            logits, labels = logits[:, :-1], labels[:, 1:]
        return cross_entropy(logits, labels, smoothing=smoothing)

    return loss


def _refuse_moved(batch: Any, labels: Tensor) -> None:
    """Refuse labels that are the next tokens already: the loss would move them once more."""
    counted = labels != NO_LABEL
    for tokens in leaves_of(batch):
        if not isinstance(tokens, Tensor) or tokens.shape != labels.shape:
            continue
        ahead = (labels[:, :-1] == tokens[:, 1:])[counted[:, :-1]]
        in_place = (labels == tokens)[counted]
        # A few of them may be equal by chance.
        if len(ahead) >= _TOKENS_TO_TELL and bool(ahead.all()) and not bool(in_place.all()):
            what = "predicts one token ahead by default, and each label is the next token already"
            cure = "give the tokens themselves as labels, or loss=, a function of output and batch"
            raise InputError(Problem("loss", what, cure))


def cross_entropy(
    logits: Tensor, labels: Tensor, *, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross entropies of labels, and how many these are."""
    exact = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    total = functional.cross_entropy(
        exact,
        labels.flatten(),
        ignore_index=NO_LABEL,
        reduction="sum",
        label_smoothing=smoothing,
    )
    return total, (labels != NO_LABEL).sum()


def _kind(module: nn.Module) -> str | None:
    """Return what transformers calls the loss of one of its models, also inside one of peft's."""
    unwrap: Any = getattr(module, "get_base_model", lambda: module)
    found = getattr(unwrap(), "loss_type", None)
    return found if isinstance(found, str) else None
