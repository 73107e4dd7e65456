"""The losses of scripts: what a user's function may return, and the loss without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from simulator.documents.problems import InputError, Problem
from worker.data.batch import NO_LABEL
from worker.data.batch_tree import leaves_of
from worker.models.user_module.parameter_uses import refused_uses

Loss = Callable[[Any, Any], Tensor | tuple[Tensor, int | Tensor]]

_CURE = "give loss=, a function of output and batch"
_SEES = "let the model return what it needs: it sees output and batch only"
_ONE_AHEAD = ("ForCausalLM", "ForConditionalGeneration")
_IN_PLACE = (
    "ForMaskedLM",
    "ForTokenClassification",
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)


def sum_and_count(
    found: Tensor | tuple[Tensor, int | Tensor], batch: Any
) -> tuple[Tensor, int | Tensor]:
    """Read what a loss returned: a sum and a count, one value per sample, or their mean."""
    if isinstance(found, tuple):
        if [torch.as_tensor(each).dim() for each in found] != [0, 0]:
            what = "returns a tuple that is not a sum and a count"
            raise InputError(Problem("loss", what, "return two scalars"))
        return found
    if found.dim() == 0:
        samples = batch_size_of(batch)
        return found * samples, samples
    if found.shape != (batch_size_of(batch),):
        sizes = " x ".join(map(str, found.shape))
        what = f"returns {sizes} values for {batch_size_of(batch)} samples"
        cure = "return one value per sample, their mean, or a pair of a sum and a count"
        raise InputError(Problem("loss", what, cure))
    return found.sum(), found.numel()


def tried_at_first(place: str, function: Loss, trained: Mapping[int, str]) -> Loss:
    """Return a loss or metric whose first call is refused if it uses the model's parameters.

    Ranks train copies of them; ``trained`` are their names by ``id``.
    """
    untried = [True]

    def tried(output: Any, batch: Any) -> Any:
        if not untried:
            return function(output, batch)
        untried.clear()
        with refused_uses(place, trained, _SEES):
            return function(output, batch)

    return tried


def wide(value: Any) -> Any:
    """Return 16-bit numbers of a model's output in 32 bits, in which losses are summed."""
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_narrow else value


def batch_size_of(batch: Any) -> int:
    """Return the number of samples of a batch: the first dimension of its first tensor."""
    tensors = (each for each in leaves_of(batch) if isinstance(each, Tensor) and each.dim())
    return len(next(tensors, batch))


def labels_of(batch: Any) -> Any:
    """Return what a batch calls its labels, or the second of a pair; ``None``: it has none."""
    if isinstance(batch, Mapping):
        return batch.get("labels")
    if isinstance(batch, tuple):
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

    def loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        logits = getattr(output, "logits", output)
        labels = labels_of(batch)
        if labels is None:
            raise InputError(Problem("loss", "has no default for a batch without labels", _CURE))
        if labels.is_floating_point() or logits.shape[-1] == 1:
            what = "has no default for a regression or for labels that are not integers"
            raise InputError(Problem("loss", what, _CURE))
        per_token = logits.dim() == 3 and labels.dim() == 2
        if per_token and kind not in _IN_PLACE:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return cross_entropy(logits, labels, smoothing=smoothing)

    return loss


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
