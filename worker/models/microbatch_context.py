"""Which samples a rank is computing, for dropout."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro batch of one step: its samples, by their index in the global batch."""

    seed: int
    step: int
    samples: Tensor


@dataclass(slots=True)
class MicroBatchContext:
    """The micro batch that is being computed; one object per rank, shared by all its layers.

    It is set before each forward pass and before each recomputed pass, so that the second one drops
    the same elements.
    """

    current: MicroBatch | None = None
