"""Which samples a rank is working on: what dropout must know beyond its input."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro batch of one step: the rows' samples, by their index in the global batch."""

    seed: int
    step: int
    samples: Tensor


@dataclass(slots=True)
class MicroBatchContext:
    """What is being computed now: one for each rank, shared by all layers that it holds.

    It is set before each forward pass, and before each pass that is computed again, so that the
    second one drops what the first one did.
    """

    current: MicroBatch | None = None
