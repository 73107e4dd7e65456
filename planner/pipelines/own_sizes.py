"""Mixes whose pipelines have micro batch sizes of their own: rough times, and their plans."""

from __future__ import annotations

import math
from dataclasses import replace

from planner.pipelines.pipeline_mix import PipelineMix
from planner.pipelines.pipeline_template import TemplateMaker
from simulator.inputs.plan_check import share_samples
from simulator.spec.plan import Plan, with_sizes

HALVINGS = 40
"""Bisection steps of the time in which a mix runs its samples."""


def rough_seconds_of(mix: PipelineMix, samples: int) -> float:
    """Rough time in which the passes of a mix compute ``samples``, in parts of micro batches too.

    Infinite if one micro batch in each pipeline is more than that.
    """
    paced = list(mix.paced)
    if sum(n * t.micro_batch for t, n in paced) > samples:
        return math.inf
    rate = sum(n * t.micro_batch / t.level_s for t, n in paced)
    late = sum(n * t.micro_batch * (t.fill_s / t.level_s - 1) for t, n in paced)
    return max((samples + late) / rate, *(t.fill_s for t, _ in paced))


def plan_with_own_sizes(mix: PipelineMix, samples: int, maker: TemplateMaker) -> Plan | None:
    """The plan of a mix that computes ``samples``; ``None`` if no micro batches add up to them."""
    templates = [template for template, n in mix.pairs for _ in range(n)]
    sizes = [template.micro_batch for template in templates]
    counts = share_samples(samples, sizes, _micro_batches(mix, samples))
    if counts is None:
        return None
    # Equal pipelines are one object: the estimator computes it once.
    known = {
        pair: maker.pipeline(*pair, mix.pipelines)
        for pair in dict.fromkeys(zip(templates, counts, strict=True))
    }
    pipelines = tuple(known[pair] for pair in zip(templates, counts, strict=True))
    plan = with_sizes(Plan(sizes[0], pipelines, together=mix.together), sizes)
    return maker.fitted(plan)


def _micro_batches(mix: PipelineMix, samples: int) -> list[int]:
    """Micro batches of each pipeline in the rough time of the mix, about ``samples`` in all."""
    runs = [template for template, n in mix.paced for _ in range(n)]

    def within(seconds: float) -> list[int]:
        return [max(1, template.micro_batches_within(seconds)) for template in runs]

    def computed(seconds: float) -> int:
        return sum(n * t.micro_batch for n, t in zip(within(seconds), runs, strict=True))

    low = 0.0
    high = max(t.fill_s + samples / t.micro_batch * t.level_s for t in runs)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if computed(middle) >= samples else (middle, high)
    return within(high)


def in_size(
    mix: PipelineMix, index: int, size: int, samples: int, maker: TemplateMaker
) -> PipelineMix | None:
    """The mix with another micro batch size of one template; ``None`` if its stages do not fit."""
    template = maker.template(mix.templates[index].stages, size, max(1, samples // size))
    if template is None:
        return None
    templates = (*mix.templates[:index], template, *mix.templates[index + 1 :])
    return replace(mix, templates=templates)
