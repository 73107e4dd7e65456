"""Corrections of a profile by the step times of the job that runs.

Each rank measures its own compute time. The medians of its ratio to the prediction, by GPU kind and
layer range, correct the profiled seconds: all of them, once one is beyond the prediction's error
bar.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from simulator.arrays import Floats
from simulator.layer_costs.roofline import LayerTimes
from simulator.spec.plan import Plan

STEP = 1.05
"""Factors are powers of this, so that noise does not change them: each change costs seconds."""


@dataclass(frozen=True, slots=True, order=True)
class Correction:
    """A GPU kind takes ``factor`` times as long for these layers as was predicted."""

    gpu: str
    first: int
    end: int
    factor: float

    def __str__(self) -> str:
        return (
            f"{self.gpu}: layers {self.first}-{self.end - 1} take {self.factor:.2f} times as long"
        )


def corrections_of(
    plan: Plan, ratios: Mapping[int, float], *, relative_error: float
) -> tuple[Correction, ...]:
    """Return corrections by GPU kind and layer range, from ratios of measured to predicted time.

    ``ratios`` is by rank; a rank's ratio holds for all its chunks. Of several ranks with the same
    layers the median counts. Nothing is corrected unless some range is beyond the error bar.
    """
    found: defaultdict[tuple[str, int, int], list[float]] = defaultdict(list)
    rank = 0
    for pipeline in plan.pipelines:
        owning = plan.owning_stages(pipeline)
        for index, owner in enumerate(owning):
            for _ in range(owner.tp):
                for stage in pipeline.stages[index :: len(owning)] if rank in ratios else ():
                    found[stage.places[0].gpu, *stage.layers].append(ratios[rank])
                rank += 1
    medians = {key: statistics.median(each) for key, each in found.items()}
    if all(abs(ratio - 1) <= relative_error for ratio in medians.values()):
        return ()
    return tuple(
        Correction(*key, STEP ** round(math.log(ratio, STEP)))
        for key, ratio in sorted(medians.items())
    )


def factors_of(corrections: Sequence[Correction], gpu: str, *, layers: int) -> Floats | None:
    """Return a kind's factor of each layer; layers that it does not hold get the kind's median."""
    mine = [each for each in corrections if each.gpu == gpu]
    if not mine:
        return None
    factors = np.full(layers, statistics.median(each.factor for each in mine))
    for index in range(layers):
        here = [each.factor for each in mine if each.first <= index < each.end]
        if here:
            factors[index] = statistics.median(here)
    return factors


def corrected(times: LayerTimes, factors: Floats, *, gpu: str) -> LayerTimes:
    """Return the times, each layer's with its factor."""
    mean = float(factors.mean())
    note = f"{gpu}: {mean:.2f} times as long as profiled, by the steps of the running job"
    provenance = replace(times.provenance, notes=(note, *times.provenance.notes))
    return LayerTimes(
        times.forward * factors,
        times.backward * factors,
        times.optimizer_s_per_parameter * mean,
        provenance,
    )
