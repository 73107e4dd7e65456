"""Pipelines to begin with: the quickest line-up of stages that many equal pipelines can have.

For some micro batch size and number of equal pipelines, times are tried until a pipeline costs no
more than its share of the GPUs (``event_reach``). What other stages do is guessed here, so that
these are drafts: the estimator judges them, and small changes do the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.paper_search.family_bounds import Array
from planner.pipelines.pipeline_template import Step, Template, TemplateMaker
from planner.search.pricing import Reach
from planner.search.stage_limits import StageFloors

TIMES = 12
"""Times that are tried at once."""
ROUNDS = 2
SLOW = 100
"""How much longer than its work alone a line-up takes at most, where no plan is known."""
PIPELINES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Line:
    """A template, how many pipelines it was made for, and its guessed seconds."""

    seconds: float
    pipelines: int
    template: Template


def lines_of(
    maker: TemplateMaker,
    floors: StageFloors,
    lot: int,
    *,
    micro_batches: Sequence[int],
    global_batch: int,
    longest_s: float | None,
) -> Iterator[Line]:
    """The best line-ups on a lot that may take no longer than that."""
    gpus = maker.lots[lot].gpus
    prices = np.array([float(choice.tp) for choice in floors.choices])
    for b in micro_batches:
        total = global_batch // b
        for pipelines in PIPELINES:
            if pipelines > min(total, gpus):
                break
            found = _quickest(
                floors,
                prices,
                micro_batch=b,
                count=-(-total // pipelines),
                pipelines=pipelines,
                budget=gpus / pipelines,
                longest_s=longest_s,
            )
            if found is not None:
                seconds, stages = found
                choices = [floors.choices[choice] for choice, _, _ in stages]
                steps = tuple(Step(lot, c.tp, c.recompute) for c in choices)
                cuts = (0, *(end for _, _, end in stages))
                yield Line(seconds, pipelines, maker.timed(steps, b, cuts))


def _quickest(
    floors: StageFloors,
    prices: Array,
    *,
    micro_batch: int,
    count: int,
    pipelines: int,
    budget: float,
    longest_s: float | None,
) -> tuple[float, tuple[tuple[int, int, int], ...]] | None:
    """The least time in which a pipeline keeps to its budget, and its stages."""
    work = floors.times(micro_batch).work
    low = count * float((prices[:, None] * work).min(axis=0).sum()) / budget
    high = SLOW * low if longest_s is None else longest_s
    if low > high:
        return None
    seconds = floors.seconds(micro_batch, count, pipelines)[:, :, :-1]
    layers = work.shape[1]
    stages_max = min(layers, int(budget / prices.min() + 1e-9))
    found = None
    for _ in range(ROUNDS):
        tried = np.geomspace(low, high, TIMES)
        reached = (seconds[..., None] <= tried).sum(axis=3)
        furthest = np.where(reached > 0, np.arange(layers)[None, None, :, None] + reached, 0)
        priced = Reach(np.arange(TIMES), furthest).priced(prices, stages_max=stages_max)
        enough = np.flatnonzero(priced.least <= budget * (1 + 1e-9))
        if not len(enough):
            return found
        best = int(enough[0])
        stages = priced.cuts_of(best)
        if stages is None:
            return found
        found = float(tried[best]), stages
        if best == 0:
            return found
        low, high = float(tried[best - 1]), float(tried[best])
    return found
