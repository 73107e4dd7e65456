"""Number formats of a job, and the loss scale that keeps small fp16 gradients from underflow."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from simulator.spec.job import Job
from worker.devices.rank_device import has_bf16

GRID, GRID_END = 2.0**-12, 2.0**3
"""The exact model computes with weights that are multiples of ``GRID`` up to ±``GRID_END``."""


@dataclass(frozen=True, slots=True)
class NumberFormats:
    """The number formats of a job: one to compute in, one for master weights and gradient sums."""

    name: str
    compute: torch.dtype
    master: torch.dtype
    on_grid: bool = False
    """Weights are rounded to a grid for computing, so that sums are exact."""
    scales_loss: bool = False
    """Gradients may underflow, so the loss is scaled up before the backward pass."""
    wire_as: torch.dtype | None = None
    """The format of activations between stages, if it differs from that of the computation."""

    @property
    def wire(self) -> torch.dtype:
        """The format of activations between stages, the same on all ranks."""
        return self.wire_as or self.compute

    @property
    def computes_on_masters(self) -> bool:
        """Whether the model computes with the master weights themselves."""
        return self.compute == self.master and not self.on_grid

    def derive(self, master: Tensor, *, into: Tensor) -> None:
        """Compute the weights that the model uses from the master weights."""
        if self.on_grid:
            torch.div(master, GRID, out=into)
            into.round_().mul_(GRID).clamp_(-GRID_END, GRID_END)
        else:
            into.copy_(master)


FP64 = NumberFormats("fp64", torch.float64, torch.float64)
EXACT = NumberFormats("exact", torch.float64, torch.float64, on_grid=True)
_BY_NAME = {
    "fp32": NumberFormats("fp32", torch.float32, torch.float32),
    "bf16": NumberFormats("bf16", torch.bfloat16, torch.float32),
    "fp16": NumberFormats("fp16", torch.float16, torch.float32, scales_loss=True),
}


def formats_of(job: Job) -> NumberFormats:
    """Return the number formats of a job."""
    return EXACT if job.model.family == "exact" else _BY_NAME[job.precision]


def on_device(formats: NumberFormats, device: torch.device) -> NumberFormats:
    """Return the number formats on a device; one without bf16 in hardware computes in fp32."""
    if formats.compute == torch.bfloat16 and not has_bf16(device):
        return replace(formats, compute=torch.float32, wire_as=torch.bfloat16)
    return formats


GROWTH_STEPS = 500
"""Steps without overflow after which the scale doubles."""
FIRST_PER_TOKEN = 4.0
"""The first scale of each token's loss. Torch begins with 2^16 for the mean of a batch: with 2^14
tokens that is 4 for each."""
SCALE_MOST = 2.0**40
"""Largest scale of the batch's mean loss, far above any that does not overflow."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """The loss scale; a function of the steps that overflowed, so it is the same on all ranks."""

    factor: float = 1.0
    good_steps: int = 0

    @classmethod
    def first(cls, formats: NumberFormats, job: Job) -> LossScale:
        """Return the scale of the first step, a power of two."""
        tokens = job.global_batch * job.sequence
        first = FIRST_PER_TOKEN * 2.0 ** math.ceil(math.log2(tokens))
        return cls(first if formats.scales_loss else 1.0)

    def restored(self, formats: NumberFormats, job: Job) -> LossScale:
        """Return the scale with which a job goes on after a restore of this one.

        Imported state and that of other formats has none: fp16 begins anew then.
        """
        is_known = formats.scales_loss and self != LossScale()
        return self if is_known else LossScale.first(formats, job)

    def after(self, formats: NumberFormats, *, overflow: bool) -> LossScale:
        """Return the scale of the next step; scales are powers of two, which round nothing.

        It never leaves 1 where the format has the range of fp32.
        """
        if not formats.scales_loss:
            return LossScale()
        if overflow:
            low = max(self.factor / 2, 1.0)
            # ``LossScale()`` stands for "saved without a scale": at the floor, count from 1.
            return LossScale(low, int(low == 1.0))
        if self.good_steps + 1 == GROWTH_STEPS:
            return LossScale(min(self.factor * 2, SCALE_MOST), 0)
        return replace(self, good_steps=self.good_steps + 1)


def loss_factor(job: Job, formats: NumberFormats, scale: LossScale) -> float:
    """Return the factor on the sum of a micro batch's losses before the backward pass.

    It depends on the job and the scale, not on the plan: sums over a whole batch that are not
    divided would overflow fp16. The exact model's gradients are integers and stay unscaled.
    """
    if formats.on_grid:
        return 1.0
    return scale.factor / (job.global_batch * job.sequence)
