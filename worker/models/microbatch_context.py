"""Which samples a rank is computing: for dropout, the loss, and a user's module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
