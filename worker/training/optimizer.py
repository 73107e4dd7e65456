"""The optimizer step, bit-equal for the same weight on every rank that holds it.

Several ranks may hold a weight, at different offsets of tensors of different lengths and on
different kinds of GPU. So the update consists of single additions, multiplications, divisions and
square roots, which every device rounds correctly. Fused multiply-adds round differently at the end
of a tensor than in its middle on a CPU, and on GPUs of another kind. On CPUs the buffers are
processed in chunks that stay in the cache, which recovers most of what fusing would save. On GPUs
of one kind a fused kernel computes each element alike wherever it stands; replicas are compared
whenever a plan opens, and with each checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from simulator.spec.job import OPTIMIZER_MOMENTS, Job, Optimizer, ParameterGroup, UpdateSettings
from simulator.spec.plan import Plan
from worker.layout.rank_layout import TensorSlot

_CHUNK = {"cpu": 2**16}
_CHUNK_ELSEWHERE = 2**24


FUSED = frozenset({"adam", "adamw"})
"""The optimizers for which torch has a suitable fused kernel."""


def learning_rate(job: Job, step: int) -> float:
    """Return the learning rate of a step, counted from 0; it depends on job and step alone."""
    if step < job.warmup_steps:
        return job.learning_rate * (step + 1) / job.warmup_steps
    if job.schedule == "constant":
        return job.learning_rate
    assert job.steps is not None, "a decaying schedule has an end"
    decaying = max(job.steps - job.warmup_steps, 1)
    done = min((step - job.warmup_steps) / decaying, 1.0)
    left = (1 + math.cos(math.pi * done)) / 2 if job.schedule == "cosine" else 1 - done
    return job.learning_rate_min + (job.learning_rate - job.learning_rate_min) * left


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """Return the factor that reduces gradients of this norm to at most ``clip_norm``."""
    if clip_norm is None or norm <= clip_norm:
        return 1.0
    return clip_norm / norm


ParameterRanges = Sequence[tuple[slice, ParameterGroup]]
"""Ranges of a flat buffer, and the group of each."""
GroupsOf = Callable[[int, Sequence[TensorSlot], int], ParameterRanges]
"""Returns the groups of a layer's flat buffer, given its slots and its length."""


def groups_in(
    slots: Sequence[TensorSlot], length: int, group_of: Callable[[str], ParameterGroup]
) -> ParameterRanges:
    """Return the groups of a flat buffer; neighbours of one group are one range."""
    found: list[tuple[slice, ParameterGroup]] = []
    if not slots:
        return found
    ends = [*(slot.offset for slot in slots[1:]), length]
    for slot, end in zip(slots, ends, strict=True):
        group = group_of(slot.spec.name)
        first = slot.offset
        if found and found[-1][1] == group:
            first = found.pop()[0].start
        found.append((slice(first, end), group))
    return found


def is_fused(job: Job, plan: Plan, device: torch.device) -> bool:
    """Return whether the update is one fused kernel: on GPUs of one kind, for Adam.

    Not for the exact family, whose updates must be bit-equal to those on a CPU.
    """
    kinds = {place.gpu for each in plan.pipelines for s in each.stages for place in s.places}
    fits = job.optimizer in FUSED and job.model.family != "exact"
    return device.type == "cuda" and len(kinds) == 1 and fits


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One optimizer step: everything that is the same for all weights."""

    optimizer: Optimizer
    learning_rate: float
    gradient_factor: float
    """Multiplies the gradients; combines loss scale, mean over labels and clipping."""
    count: int
    """The number of updates, including this one."""
    settings: UpdateSettings = field(default_factory=UpdateSettings)
    schedules: tuple[float, ...] = (1.0,)
    """The factors of a script's schedules on the learning rate of this step."""
    is_fused: bool = False
    """One kernel that reads and writes each value once, instead of 13."""

    @classmethod
    def moment_count(cls, job: Job) -> int:
        """Return how many moments are kept for each weight."""
        return OPTIMIZER_MOMENTS[job.optimizer]

    def of_group(self, group: ParameterGroup) -> OptimizerStep:
        """Return the step of the parameters of a group."""
        settings = self.settings
        if group.weight_decay is not None:
            settings = replace(settings, weight_decay=group.weight_decay)
        rate = self.learning_rate * self.schedules[group.schedule] * group.learning_rate_factor
        return replace(self, learning_rate=rate, settings=settings)

    def apply_by_group(
        self,
        groups: ParameterRanges,
        weight: Tensor,
        gradient: Tensor,
        moments: tuple[Tensor, ...],
    ) -> None:
        """Update weights in place, each range with the settings of its group."""
        for part, group in groups:
            here = tuple(moment[part] for moment in moments)
            self.of_group(group).apply(weight[part], gradient[part], here)

    def apply(self, weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...]) -> None:
        """Update the weights in place; the fused kernel changes the gradient, too."""
        if self.is_fused:
            self._apply_fused(weight, gradient, *moments)
            return
        size = _CHUNK.get(weight.device.type, _CHUNK_ELSEWHERE)
        scratch = weight.new_empty(2, min(size, weight.numel()))
        for begin in range(0, weight.numel(), size):
            part = slice(begin, min(begin + size, weight.numel()))
            count = part.stop - part.start
            here = tuple(moment[part] for moment in moments)
            step = self._apply_sgd if self.optimizer == "sgd" else self._apply_adam
            step(weight[part], gradient[part], *here, a=scratch[0, :count], b=scratch[1, :count])

    def _apply_fused(self, weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor) -> None:
        beta_1, beta_2 = self.settings.betas
        number = partial(torch.full, (), dtype=torch.float32, device=weight.device)
        update = torch._fused_adamw_ if self.optimizer == "adamw" else torch._fused_adam_
        update(
            [weight],
            [gradient],
            [m],
            [v],
            [],
            [number(float(self.count))],
            lr=self.learning_rate,
            beta1=beta_1,
            beta2=beta_2,
            weight_decay=self._decay,
            eps=self.settings.epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=number(1 / self.gradient_factor),
            found_inf=None,
        )

    @property
    def _decay(self) -> float:
        return self.settings.decay(self.optimizer)

    def _add_decay(self, weight: Tensor, gradient: Tensor, *, a: Tensor, b: Tensor) -> Tensor:
        """Write the gradient in its final scale, with the decay of the weights, into ``a``."""
        torch.mul(gradient, self.gradient_factor, out=a)
        if self._decay:
            a.add_(torch.mul(weight, self._decay, out=b))
        return a

    def _apply_sgd(
        self, weight: Tensor, gradient: Tensor, m: Tensor, *, a: Tensor, b: Tensor
    ) -> None:
        self._add_decay(weight, gradient, a=a, b=b)
        m.mul_(self.settings.momentum).add_(a)
        if self.settings.nesterov:
            a.add_(torch.mul(m, self.settings.momentum, out=b))
            a.mul_(self.learning_rate)
        else:
            torch.mul(m, self.learning_rate, out=a)
        weight.sub_(a)

    def _apply_adam(
        self, weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, *, a: Tensor, b: Tensor
    ) -> None:
        beta_1, beta_2 = self.settings.betas
        factor = self.gradient_factor
        if self.optimizer == "adam" and self._decay:
            gradient, factor = self._add_decay(weight, gradient, a=a, b=b), 1.0
        torch.mul(gradient, factor * (1 - beta_1), out=b)
        m.mul_(beta_1).add_(b)
        torch.mul(gradient, gradient, out=a)
        a.mul_(factor**2 * (1 - beta_2))
        v.mul_(beta_2).add_(a)
        # The bias corrections c1 and c2 are folded into two constants: lr/c1 * m / (sqrt(v/c2) + e)
        # = lr sqrt(c2)/c1 * m / (sqrt(v) + e sqrt(c2)).
        root = math.sqrt(1 - beta_2**self.count)
        torch.sqrt(v, out=a)
        a.add_(self.settings.epsilon * root)
        torch.div(m, a, out=b)
        b.mul_(self.learning_rate * root / (1 - beta_1**self.count))
        if self.optimizer == "adamw":
            weight.mul_(1 - self.learning_rate * self._decay)
        weight.sub_(b)
