"""Which samples a rank is computing: for dropout, the loss, and a user's module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from worker.devices.rank_device import to_device


@dataclass(slots=True)
class MicroBatch:
    """One micro batch of one step."""

    seed: int
    step: int
    samples: Tensor
    """The samples, by their index in the global batch."""
    inputs: Any = None
    """What the model is called with; only where a stage needs it."""
    labels: Tensor | None = None
    """Only on the last stage."""
    label_count: int = 0
    """Over how many labels the loss is a sum; a user's loss sets it."""
    block_arguments: Any = None
    """What a user's module passes to its blocks beside the hidden state, once it is known."""


@dataclass(slots=True)
class MicroBatchContext:
    """The micro batch that is being computed; one object per rank, shared by all its layers.

    It is set before each forward pass and before each recomputed pass, so that the second one drops
    the same elements.
    """

    current: MicroBatch | None = None


def batch_on_device(
    batch: Any, *, of_module: bool, dtype: torch.dtype, device: torch.device
) -> Any:
    """Move a batch; what the model takes gets its type, and targets keep theirs."""
    move = partial(_moved, device=device, dtype=None)
    convert = partial(_moved, device=device, dtype=dtype)
    if of_module and isinstance(batch, tuple):
        first = batch_on_device(batch[0], of_module=True, dtype=dtype, device=device)
        return first, *(tree_map(move, each) for each in batch[1:])
    if of_module and isinstance(batch, Mapping) and "labels" in batch:
        return {**tree_map(convert, batch), "labels": tree_map(move, batch["labels"])}
    return tree_map(convert, batch)


def _moved(value: Any, *, device: torch.device, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return to_device(value, device, dtype if value.is_floating_point() else None)
