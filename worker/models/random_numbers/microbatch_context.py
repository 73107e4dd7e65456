"""Which samples a rank is computing: for dropout, the loss, and a user's module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.data.batch_tree import map_tensors, parts_of, with_parts
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
    label_count: int | Tensor = 0
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

    def move(value: Tensor) -> Tensor:
        return to_device(value, device)

    def convert(value: Tensor) -> Tensor:
        return to_device(value, device, dtype if value.is_floating_point() else None)

    parts = parts_of(batch) if of_module else None
    if parts is None:
        return map_tensors(convert, batch)
    moved = {}
    for name, part in parts.items():
        if name == 0 and isinstance(batch, tuple):
            moved[name] = batch_on_device(part, of_module=True, dtype=dtype, device=device)
        else:
            is_target = isinstance(batch, tuple) or name == "labels"
            moved[name] = map_tensors(move if is_target else convert, part)
    return with_parts(batch, moved)
