"""In which numbers a model is computed, kept and summed, and how small gradients are kept alive."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from simulator.spec.job import Job

GRID, GRID_END = 2.0**-12, 2.0**3
"""Weights of the exact trainer are multiples of the one and no larger than the other, where the
model computes with them."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The numbers of a job: one kind to compute with, one to keep weights and sum gradients in."""

    name: str
    compute: torch.dtype
    master: torch.dtype
    on_grid: bool = False
    """Weights are rounded to a grid before the model computes with them, so that sums are exact."""
    scales_loss: bool = False
    """Gradients may fall below the smallest number, so that the loss is scaled up before."""

    @property
    def computes_on_masters(self) -> bool:
        """The weights that are kept are those that the model computes with."""
        return self.compute == self.master and not self.on_grid

    def derive(self, master: Tensor, *, into: Tensor) -> None:
        """Make the weights that the model computes with."""
        if self.on_grid:
            torch.div(master, GRID, out=into)
            into.round_().mul_(GRID).clamp_(-GRID_END, GRID_END)
        else:
            into.copy_(master)


FP64 = Precision("fp64", torch.float64, torch.float64)
EXACT = Precision("exact", torch.float64, torch.float64, on_grid=True)
_BY_NAME = {
    "fp32": Precision("fp32", torch.float32, torch.float32),
    "bf16": Precision("bf16", torch.bfloat16, torch.float32),
    "fp16": Precision("fp16", torch.float16, torch.float32, scales_loss=True),
}


def precision_of(job: Job) -> Precision:
    """The numbers that a job asks for."""
    return EXACT if job.model.family == "exact" else _BY_NAME[job.precision]


GROWTH_STEPS = 2000
"""After so many steps without overflow the scale doubles."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """By how much the loss is scaled; a function of which steps have overflowed, so all agree."""

    factor: float = 1.0
    good_steps: int = 0

    @classmethod
    def first(cls, precision: Precision) -> LossScale:
        """The scale of the first step."""
        return cls(2.0**16 if precision.scales_loss else 1.0)

    def after(self, *, overflow: bool) -> LossScale:
        """The scale of the next step; scales are powers of two, which change no digit."""
        if overflow:
            return LossScale(max(self.factor / 2, 1.0), 0)
        if self.good_steps + 1 == GROWTH_STEPS:
            return LossScale(min(self.factor * 2, 2.0**24), 0)
        return replace(self, good_steps=self.good_steps + 1)


def loss_seed(job: Job, precision: Precision, scale: LossScale) -> float:
    """What the sum of a micro batch's losses is multiplied by before the backward pass.

    A constant of the job, so that no plan shows in it: sums over a whole batch would overflow
    small numbers. The exact trainer's gradients are whole numbers and stay so.
    """
    if precision.on_grid:
        return 1.0
    return scale.factor / (job.global_batch * job.sequence)
