"""The fewest GPUs that hold a job, whatever it would take them: a proof where there are fewer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.search.pricing import Reach, batch_counts
from planner.search.stage_limits import StageFloors

FOREVER_S = 1e15


def fewest_gpus(floors: StageFloors, micro_batches: Sequence[int], gpus: int) -> float:
    """GPUs of the smallest pipeline with that many GPUs or fewer; inf if even these are too few.

    Kinds count alike, as if each were there in any number.
    """
    prices = np.array([float(choice.tp) for choice in floors.choices])
    stages_max = min(floors.costs.layer_count, gpus)
    least = np.inf
    for b in micro_batches:
        # One micro batch needs the least memory; shards of optimizer states may be the smallest.
        for pipelines in (1, gpus):
            most = floors.most(b, FOREVER_S, pipelines, pipelines)
            priced = Reach.of(most, batch_counts(1)).priced(prices, stages_max=stages_max)
            least = min(least, float(priced.least[0]))
    return float(least) if least <= gpus else np.inf
