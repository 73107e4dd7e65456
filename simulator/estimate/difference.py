"""The error bar of a difference: how far apart two plans of one job must be to be told apart.

Predictions of one job share most of their errors, so a difference is surer than either of them.
What does not cancel depends on what the plans do differently (docs/accuracy.md; ADR 98).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from simulator.spec.plan import Pipeline, Place, Plan, Stage

REPEATED = 0.02
"""Error between plans with pipelines of the same shape, as measured layers have it."""
OTHER_SHAPE = 0.046
"""Error that is added where pipelines differ in depth, micro batch size or recomputation; assumed
for offload, too, which was not measured."""
OTHER_TP = 0.07
"""Error that is added where the work runs under another TP degree."""
WorkKeyOf = Callable[[Plan, Pipeline, Stage, Place, str], Hashable]
"""What the errors of a stage's layers depend on, at a place, if recomputed, offloaded or kept."""


def difference_error(
    one: Plan, other: Plan, *, one_error: float = 0.0, other_error: float = 0.0
) -> float:
    """The error bar of the ratio of two predicted times or costs of one job.

    ``one_error`` and ``other_error`` are the plans' own error bars: they count for work on other
    kinds of GPUs, whose errors have nothing in common.
    """

    def moved(key: WorkKeyOf) -> float:
        here, there = _work(one, key), _work(other, key)
        return 1.0 - sum(min(share, there.get(each, 0.0)) for each, share in here.items())

    return math.hypot(
        REPEATED,
        OTHER_SHAPE * moved(lambda plan, p, _, __, way: (plan.size_of(p), len(p.stages), way)),
        OTHER_TP * moved(lambda _, __, stage, *___: stage.tp),
        math.hypot(one_error, other_error) * moved(lambda _, __, ___, place, ____: place.gpu),
    )


def are_told_apart(one: float, other: float, error: float) -> bool:
    """Whether two predicted times or costs differ by more than their error bar."""
    low, high = sorted((one, other))
    return high > low * (1 + error)


def _work(plan: Plan, key: WorkKeyOf) -> dict[Hashable, float]:
    """Shares of the work (layers x samples), by ``key``."""
    work: dict[Hashable, float] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            again, away = stage.recomputed, stage.offloaded
            kept = stage.layers[1] - stage.layers[0] - again - away
            for way, layers in (("again", again), ("away", away), ("kept", kept)):
                each = plan.samples_of(pipeline) * layers / sum(stage.split)
                for place, share in zip(stage.places, stage.split, strict=True) if each else ():
                    name = key(plan, pipeline, stage, place, way)
                    work[name] = work.get(name, 0.0) + each * share
    total = sum(work.values())
    return {name: amount / total for name, amount in work.items()}
