"""Every plan of a small case under an estimator that judges whole plans.

Pipelines may differ in everything, so all pipelines that the GPUs allow are listed once, then
all sets of them that fit together, then all ways to deal the micro batches. Each way has a bound
from its computing alone; they are judged in the order of their bounds until no better can come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.supply import Lot
from planner.templates import Step, Template, TemplateMaker

GPUS_MAX = 6
WAYS_MAX = 60_000

Deal = tuple[tuple[Template, int], ...]
"""Pipelines with their micro batches."""


class _TooManyError(Exception):
    """There are more plans than can be looked at."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A pipeline with the computing time of each stage, for bounds."""

    template: Template
    stages_s: tuple[float, ...]
    gpus: tuple[tuple[tuple[int, int], int], ...]

    def least_s(self, micro_batches: int) -> float:
        """A stage waits for a micro batch to pass those before it, there and back."""
        ahead, least = 0.0, 0.0
        for seconds in self.stages_s:
            least = max(least, ahead + micro_batches * seconds)
            ahead += seconds
        return max(least, ahead)


def every_deal(
    maker: TemplateMaker,
    lots: Sequence[Lot],
    options: Sequence[Step],
    *,
    micro_batches: Sequence[int],
    global_batch: int,
    worth_of: Callable[[float, Deal], float],
) -> list[tuple[float, Deal]] | None:
    """All plans by their bounds, or none if there are too many."""
    if sum(lot.gpus for lot in lots) > GPUS_MAX:
        return None
    found: list[tuple[float, Deal]] = []
    try:
        for b in micro_batches:
            lines = list(_lines(maker, lots, options, b))
            total = global_batch // b
            for chosen in _sets(lines, lots, total):
                for counts in _compositions(total, chosen):
                    least = max(line.least_s(n) for line, n in zip(chosen, counts, strict=True))
                    deal = tuple((line.template, n) for line, n in zip(chosen, counts, strict=True))
                    found.append((worth_of(least, deal), deal))
                    if len(found) > WAYS_MAX:
                        raise _TooManyError
    except _TooManyError:
        return None
    found.sort(key=lambda pair: pair[0])
    return found


def _lines(
    maker: TemplateMaker, lots: Sequence[Lot], options: Sequence[Step], micro_batch: int
) -> Iterator[_Line]:
    """All pipelines that the lots can hold one of."""
    layers = maker.costs.layer_count
    count = 0
    gpus = sum(lot.gpus for lot in lots)
    for stages in range(1, min(layers, gpus) + 1):
        for steps in itertools.product(options, repeat=stages):
            template_gpus: dict[tuple[int, int], int] = {}
            for step in steps:
                key = (step.lot, step.tp)
                template_gpus[key] = template_gpus.get(key, 0) + 1
            if not _holds(template_gpus, lots):
                continue
            for inner in itertools.combinations(range(1, layers), stages - 1):
                count += 1
                if count > WAYS_MAX // 4:
                    raise _TooManyError
                cuts = (0, *inner, layers)
                rows = [
                    maker.seconds(lots[x.lot].gpu, x.tp, micro_batch, x.recompute) for x in steps
                ]
                yield _Line(
                    maker.timed(steps, micro_batch, cuts),
                    tuple(row[cuts[s + 1]] - row[cuts[s]] for s, row in enumerate(rows)),
                    tuple(template_gpus.items()),
                )


def _holds(groups: dict[tuple[int, int], int], lots: Sequence[Lot]) -> bool:
    by_lot: dict[int, dict[int, int]] = {}
    for (lot, tp), count in groups.items():
        by_lot.setdefault(lot, {})[tp] = count
    return all(lots[lot].holds(of_lot) for lot, of_lot in by_lot.items())


def _sets(lines: Sequence[_Line], lots: Sequence[Lot], total: int) -> Iterator[list[_Line]]:
    """Sets of pipelines (the same one may stand several times) that fit together."""
    chosen: list[_Line] = []
    taken: dict[tuple[int, int], int] = {}

    def walk(start: int) -> Iterator[list[_Line]]:
        for index in range(start, len(lines)):
            line = lines[index]
            for key, count in line.gpus:
                taken[key] = taken.get(key, 0) + count
            if _holds(taken, lots):
                chosen.append(line)
                yield list(chosen)
                if len(chosen) < total:
                    yield from walk(index)
                chosen.pop()
            for key, count in line.gpus:
                taken[key] -= count

    return walk(0)


def _compositions(total: int, chosen: Sequence[_Line]) -> Iterator[tuple[int, ...]]:
    """Ways to deal micro batches; equal pipelines take them in falling order."""
    if len(chosen) > total:
        return
    for inner in itertools.combinations(range(1, total), len(chosen) - 1):
        counts = tuple(b - a for a, b in itertools.pairwise((0, *inner, total)))
        if all(
            counts[i] >= counts[i + 1] for i in range(len(chosen) - 1) if chosen[i] is chosen[i + 1]
        ):
            yield counts
