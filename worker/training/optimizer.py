"""The step of the optimizer, such that the same weight gets the same bits wherever it is kept.

One weight may be kept by several ranks, at different places of differently long tensors and on
devices of different kinds. So the update is made of single additions, multiplications, divisions
and square roots, which every device rounds correctly: fused kernels and fused multiply-adds round
differently at the ends of a tensor than in its middle. Memory is passed over in portions that
stay in the cache, which makes up for most of what fusing would save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from simulator.spec.job import OPTIMIZER_MOMENTS, Job

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
WEIGHT_DECAY = 0.01
"""Of AdamW; Adam and SGD have none."""
MOMENTUM = 0.9

_PORTION = {"cpu": 2**16}
_PORTION_ELSEWHERE = 2**24


def learning_rate(job: Job, step: int) -> float:
    """The learning rate of a step, which no plan and no history changes; steps count from 0."""
    if step < job.warmup_steps:
        return job.learning_rate * (step + 1) / job.warmup_steps
    if job.schedule == "constant":
        return job.learning_rate
    assert job.steps is not None, "a schedule that decays has an end"
    decaying = max(job.steps - job.warmup_steps, 1)
    done = min((step - job.warmup_steps) / decaying, 1.0)
    left = (1 + math.cos(math.pi * done)) / 2 if job.schedule == "cosine" else 1 - done
    return job.learning_rate * left


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """What gradients of this norm are multiplied by to have at most the job's norm."""
    if clip_norm is None or norm <= clip_norm:
        return 1.0
    return clip_norm / norm


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One step of the optimizer: everything about it that is the same for all weights."""

    optimizer: str
    learning_rate: float
    gradient_factor: float
    """Gradients are multiplied by it: the loss scale, the mean over tokens and the clipping."""
    count: int
    """How many updates there have been, this one included."""

    @classmethod
    def moments(cls, job: Job) -> int:
        """How many moments are kept for each weight."""
        return OPTIMIZER_MOMENTS[job.optimizer]

    def apply(self, weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...]) -> None:
        """Move the weights; the gradient is left as it is."""
        size = _PORTION.get(weight.device.type, _PORTION_ELSEWHERE)
        scratch = weight.new_empty(2, min(size, weight.numel()))
        for begin in range(0, weight.numel(), size):
            part = slice(begin, min(begin + size, weight.numel()))
            count = part.stop - part.start
            here = tuple(moment[part] for moment in moments)
            step = self._sgd if self.optimizer == "sgd" else self._adam
            step(weight[part], gradient[part], *here, a=scratch[0, :count], b=scratch[1, :count])

    def _sgd(self, weight: Tensor, gradient: Tensor, m: Tensor, *, a: Tensor, b: Tensor) -> None:  # noqa: ARG002 - Adam needs b
        torch.mul(gradient, self.gradient_factor, out=a)
        m.mul_(MOMENTUM).add_(a)
        torch.mul(m, self.learning_rate, out=a)
        weight.sub_(a)

    def _adam(
        self, weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, *, a: Tensor, b: Tensor
    ) -> None:
        torch.mul(gradient, self.gradient_factor * (1 - BETA_1), out=b)
        m.mul_(BETA_1).add_(b)
        torch.mul(gradient, gradient, out=a)
        a.mul_(self.gradient_factor**2 * (1 - BETA_2))
        v.mul_(BETA_2).add_(a)
        # Both corrections for the moments' start at zero are put into two constants:
        # lr/c1 * m / (sqrt(v/c2) + e) = lr sqrt(c2)/c1 * m / (sqrt(v) + e sqrt(c2)).
        root = math.sqrt(1 - BETA_2**self.count)
        torch.sqrt(v, out=a)
        a.add_(EPSILON * root)
        torch.div(m, a, out=b)
        b.mul_(self.learning_rate * root / (1 - BETA_1**self.count))
        if self.optimizer == "adamw":
            weight.mul_(1 - self.learning_rate * WEIGHT_DECAY)
        weight.sub_(b)
